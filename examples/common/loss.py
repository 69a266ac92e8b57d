"""The loss of next tokens without the logits of all: from hidden states and the head's weight, in chunks of rows.

1. torch's own ``linear_cross_entropy`` computes it (torch >= 2.15). It gives the loss of each token, which is averaged
   in FP32. Its own mean would be added up in the type of the hidden states: in bf16 it is off by up to 2 %, and in FP16
   the factor of a gradient scaler, which has to pass through it, is infinite. The price is that backward makes each
   chunk's logits again.
2. A head may do more than its matrix (cap, scale, adapt), and a model's loss may have more terms than this one (that
   of a router). Neither is looked up: the given model is tried with two passes of few tokens. What its head is given
   has to be what its base model returns, its logits what the head's weight makes of that, to the last bit, and its loss
   the cross entropy of these logits.
3. Of a model without weights, whose run is planned, the same is seen in the structure: which tensor is made of which.
4. No graph of its backward can be made: asked for one, it is an error. In compiled code it is not used.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad

from .checkpoints import planned
from .errors import BadInput
from .text import IGNORED

logger = logging.getLogger(__name__)

Kind = Literal["auto", "chunked", "full"]
LARGE = 16_384  # tokens of a vocabulary from which "auto" takes chunks
LENGTH = 8  # of the rows that are tried
PLAIN = 1e-5  # the relative difference between two sums of a few FP32 numbers, at most
GIVEN = {"num_items_in_batch", "shift_labels"}  # what else a model's own loss may be given


class NextTokens:
    """The loss of next tokens, the model's own or in chunks."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.chunked: bool | None = None if kind != "full" else False  # None: not decided yet

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Compute the loss. With a cache a model would take positions that begin again for one long document."""
        if self.chunked is None:
            self.chunked = self.decide(model, batch)
        if not self.chunked or (self.kind == "auto" and torch.compiler.is_compiling()):
            return model(**batch, use_cache=False).loss
        return in_chunks(model, batch)

    def each(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Compute the loss of the token that follows each, one row after the other; 0 where none is learned."""
        if self.chunked is None:
            self.chunked = self.decide(model, batch)
        if self.chunked:
            return each_in_chunks(
                unadapted(model).get_output_embeddings(), hidden_states(model, batch), batch["labels"]
            )
        given = {name: value for name, value in batch.items() if name != "labels"}
        return each_of_logits(model(**given, use_cache=False).logits, batch["labels"])

    def each_from(self, model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        """Do the same from hidden states, of a model for which `why_not_from_hidden` returned None."""
        if self.chunked is None:
            reason = why_not_in_chunks(model)
            if reason and self.kind == "chunked":
                raise BadInput(f"model.loss=chunked: {reason}; set model.loss=full, or leave it at auto")
            self.chunked = reason is None and (self.kind == "chunked" or vocabulary(model) >= LARGE)
        head = unadapted(model).get_output_embeddings()
        return each_in_chunks(head, hidden, labels) if self.chunked else each_of_logits(head(hidden), labels)

    def decide_now(self, model: Any) -> None:
        """Decide before there is a batch, for a model without weights (Rule 3)."""
        if self.chunked is None:
            self.chunked = self.decide(model, {})

    def decide(self, model: Any, batch: dict[str, Tensor]) -> bool:
        """Decide whether to take chunks; in "auto" log why not where they would have paid, else raise."""
        if self.kind == "auto" and vocabulary(model) < LARGE:
            return False
        reason = why_not(model, batch)
        if reason is None:
            return True
        if self.kind == "chunked":
            raise BadInput(f"model.loss=chunked: {reason}; set model.loss=full, or leave it at auto")
        logger.warning("the loss is computed from the logits of all tokens at once: %s", reason)
        return False


def vocabulary(model: Any) -> int:
    """Return the number of tokens that a model tells apart."""
    return unadapted(model).config.get_text_config().vocab_size


def unadapted(model: Any) -> Any:
    """Return the model of transformers, which may be under adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def why_not(model: Any, batch: dict[str, Tensor]) -> str | None:
    """Return the reason why a model's loss cannot be computed in chunks (Rules 2 and 4), or None."""
    return why_not_in_chunks(model) or why_not_from_hidden(model, batch)


def why_not_in_chunks(model: Any) -> str | None:
    """Return the reason why no loss can be computed in chunks (Rules 1 and 4), or None."""
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        return f"torch {torch.__version__} computes none in chunks, torch 2.15 does (pip install 'torch>=2.15')"
    if torch.compiler.is_compiling() or hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        return f"{type(unadapted(model)).__name__} is compiled"
    return None


def why_not_from_hidden(model: Any, batch: dict[str, Tensor]) -> str | None:
    """Return the reason why a loss is not that of hidden states and the head's weight alone (Rule 2), or None."""
    whole = unadapted(model)
    name, head = type(whole).__name__, whole.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"the head of {name} is a {type(head).__module__}.{type(head).__qualname__}, not an nn.Linear"
    if whole.base_model is whole:
        return f"{name} has no base model that runs without its head"
    if found := GIVEN & batch.keys():
        return f"a batch holds {', '.join(sorted(found))}, which are for the model's own loss"
    try:
        return differs(model, whole, head) if not planned() else differs_in_structure(model, whole, head)
    except Exception as error:
        return f"{name} does not run on a few tokens alone ({type(error).__name__}: {error})"


@torch.no_grad()
def differs(model: Any, whole: Any, head: nn.Linear) -> str | None:
    """Return what tells a model's logits or loss from those of its head's weight (Rule 2), or None."""
    device, seen, name = head.weight.device, [], type(whole).__name__
    tokens = few_tokens(model, device)
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == tokens[0, 3], IGNORED)}
    hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        with unchanged(device):
            own = model(**batch, use_cache=False)
    finally:
        hook.remove()
    with unchanged(device):
        hidden = hidden_states(model, batch)
    if len(seen) != 1 or hidden.shape != seen[0].shape or not torch.equal(hidden, seen[0]):
        return f"the head of {name} is given something else than what its base model returns"
    if not torch.equal(linear(hidden, head.weight, head.bias).float(), own.logits.float()):
        return f"{name} does more to its logits than its head's weight does (a cap, a scale, a slice)"
    logits, labels = own.logits.float().flatten(0, 1), following(batch["labels"])
    expected = cross_entropy(logits, labels, ignore_index=IGNORED)
    if abs(float(own.loss.float() - expected)) > PLAIN * abs(float(expected)):
        return f"the loss of {name} is not the cross entropy of its logits alone (a router's loss, smoothed labels)"
    return None


def few_tokens(model: Any, device: torch.device) -> Tensor:
    """Return two rows to try a model with."""
    tokens = torch.arange(2 * LENGTH, device=device).add(vocabulary(model) // 2).remainder(vocabulary(model))
    return tokens.view(2, LENGTH)


def differs_in_structure(model: Any, whole: Any, head: nn.Linear) -> str | None:
    """Return what tells a model's loss from that of its head's weight, without values (Rule 3), or None."""
    seen: list[Tensor] = []
    hooks = [
        whole.base_model.register_forward_hook(lambda _, __, output: seen.append(output[0])),
        head.register_forward_hook(lambda _, args, output: seen.extend((args[0], output))),
    ]
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    try:
        with torch.enable_grad():
            own = model(input_ids=tokens, labels=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    name, (base, given, made, logits) = type(whole).__name__, map(storage_of, (*seen, own.logits))
    if base != given:
        return f"the head of {name} is given something else than what its base model returns"
    if made != logits:
        return f"{name} does more to its logits than its head's weight does (a cap, a scale, a slice)"
    if not own.loss.grad_fn.name().startswith("NllLoss"):
        return f"the loss of {name} is not the cross entropy of its logits alone (a router's loss, smoothed labels)"
    return None


def storage_of(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from that of others, even where it has none."""
    return tensor.untyped_storage()._cdata


def unchanged(device: torch.device) -> Any:
    """Return a context that leaves the random state as it was, so that two passes draw the same dropout."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def hidden_states(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Run the base model, up to what its head is given."""
    base = unadapted(model).base_model
    takes_labels = "labels" in inspect.signature(base.forward).parameters
    given = {name: value for name, value in batch.items() if name != "labels" or takes_labels}
    return base(**given, use_cache=False)[0]


def following(labels: Tensor) -> Tensor:
    """Return the label of what follows each token, for all rows one after the other."""
    return pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()


def in_chunks(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Compute the mean loss of the next tokens in chunks of rows (Rule 1)."""
    losses = each_in_chunks(unadapted(model).get_output_embeddings(), hidden_states(model, batch), batch["labels"])
    return losses.sum() / (following(batch["labels"]) != IGNORED).sum()


def each_in_chunks(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of the token that follows each, in chunks of rows; 0 where none is learned (Rule 1)."""
    hidden = hidden.flatten(0, 1)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype

    def cast(tensor: Any) -> Any:
        return tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)

    hidden, weight, bias = cast(hidden), cast(head.weight), cast(head.bias)
    with torch.autocast(kind, enabled=False):  # backward makes the chunks again without it
        losses = nn.functional.linear_cross_entropy(
            *(hidden, weight, following(labels)),
            linear_bias=bias,
            ignore_index=IGNORED,
            reduction="none",
            options=nn.LinearCrossEntropyOptions(),
        )
    if losses.requires_grad:
        losses.register_hook(refuse_a_graph)
    return losses.float()


def each_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of the token that follows each, from the logits of all; 0 where none is learned."""
    return cross_entropy(logits.flatten(0, 1).float(), following(labels), ignore_index=IGNORED, reduction="none")


def refuse_a_graph(_: Tensor) -> None:
    """Raise if backward makes a graph of itself, in which this loss would be missing (Rule 4)."""
    if torch.is_grad_enabled():
        raise BadInput("a graph of the backward (create_graph=True) needs all logits at once: set model.loss=full")

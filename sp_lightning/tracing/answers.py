"""Answers in a dry run: few passes over the weights stand for all of them.

1. Answers are no step: nothing is differentiated. Three passes over the weights stand for them: one reads the prompts,
   with the images that belong to them, one makes the token in the middle of each answer, and one the last. Layers of a
   cache on the host wait there as with examples/common/host_cache.py: the one before is on its way down, and the next
   one on its way up. For the simulation a layer comes up before its visit.
2. A training step may begin with answers (`Generated`). They are as long as may be, of tokens that are made up; the
   model's own ``generate`` makes one token in each of three passes, which count as `StepPhase` says.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError, UnsupportedError
from ..runtime.handle import Handle
from .memory_tracker import MemoryTracker
from .step_trace import CACHE, StepPhase

OF_TEXT = "input_ids", "attention_mask", "position_ids", "past_key_values", "labels"  # the rest goes with prompts alone
KEEPS_MORE = "update_conv_state", "update_indexer"  # of a cache's layers that cannot wait on the host
STRIDE = 7919  # between the tokens of answers that are made up

_here = threading.local()  # the tracker of the dry run on this thread


@dataclass(frozen=True)
class Answers:
    """Tokens that a language model generates for each prompt of a batch (Rule 1)."""

    tokens: int
    cache: str  # where keys and values of layers that are not in use wait: "device" or "host"


@contextlib.contextmanager
def counted_by(tracker: MemoryTracker) -> Iterator[None]:
    """Count what this thread's code does within this context (`begins`)."""
    _here.tracker = tracker
    try:
        yield
    finally:
        del _here.tracker


def begins(times: float) -> None:
    """Note that the visits from here on, to the next note, take place this many times in a step (Rule 2)."""
    tracker: MemoryTracker = _here.tracker
    tracker.phases.append(StepPhase(len(tracker.visits), times))


def generating(module: nn.Module) -> Any:
    """Return the decoder of transformers in a module that continues texts; None if there is none."""
    child: Any
    for child in module.modules():
        generates = getattr(child, "can_generate", None)
        if generates is not None and generates() and not child.config.is_encoder_decoder:
            return child
    return None


def answer(handle: Handle, batch: Any, answers: Answers, tracker: MemoryTracker) -> None:
    """Run the passes of an answer (Rule 1)."""
    from transformers import DynamicCache

    model, prompts = generating(handle.module), batch["input_ids"] if hasattr(batch, "keys") else batch
    plain = DynamicCache(config=model.config)
    if answers.cache == "host" and any(hasattr(layer, name) for layer in plain.layers for name in KEEPS_MORE):
        raise OptionError(argument="cache", found="host", allowed="'device': the layers keep more than keys and values")
    cache = _CountedCache(plain, tracker, answers.cache == "host")
    given = {"past_key_values": cache.plain, "use_cache": True}
    taken = inspect.signature(model.forward).parameters
    if "logits_to_keep" in taken:
        given["logits_to_keep"] = 1
    given_beside = {} if batch is prompts else {name: batch[name] for name in taken if name in batch}
    beside = {name: value for name, value in given_beside.items() if name not in OF_TEXT}
    middle, one = answers.tokens // 2, prompts[:, :1]
    alone: dict[str, Any] = {}
    passes = (prompts, 0, beside), (one, middle - 1, alone), (one, answers.tokens - middle - 1, alone)
    handle.open_scope("predict")
    with torch.no_grad():
        for tokens, between, more in passes:
            cache.lengthen(between)
            tracker.passes.append(len(tracker.visits))
            model(tokens, **given, **more)
    handle.close_scope()


class _CountedCache:
    """A cache whose tensors are counted, on the device or, but for three layers, on the host (Rule 1)."""

    NAMES = ("keys", "values")

    def __init__(self, plain: Any, tracker: MemoryTracker, on_host: bool) -> None:
        self.plain = plain
        self._tracker = tracker
        self._on_host = on_host
        self._update, plain.update = plain.update, self._counted_update
        self._away: set[int] = set()  # layers on the host
        self._leaving: list[Tensor] = []  # tensors on their way down, which take memory until the next update
        self._last: int | None = None

    def close(self) -> None:
        """Let the tensors end with the last reference to the cache."""
        del self.plain.update

    def lengthen(self, count: int) -> None:
        """Append this many tokens to all layers, on the device or on the host."""
        for index, layer in enumerate(self.plain.layers):
            tensors = self._tensors(index)
            if tensors and count > 0:
                with self._tracker.on_host():
                    layer.update(*(each.new_empty(*each.shape[:2], count, each.shape[3]) for each in tensors))
                self._place(index, index in self._away)

    def _counted_update(self, keys: Tensor, values: Tensor, index: int, *args: Any, **kwargs: Any) -> Any:
        visit = self._tracker.visits[-1]
        self._leaving.clear()
        if self._on_host:
            if self._last not in (None, index):
                self._leaving = self._place(self._last, True)
            visit.fetched_nbytes += self._nbytes(index)
            self._fetch(index)
        result = self._update(keys, values, index, *args, **kwargs)
        for tensor in self._tensors(index):
            self._tracker.mark(tensor, CACHE)
        if self._on_host:
            visit.stowed_nbytes += self._nbytes(index)
            self._last = index
            self._fetch((index + 1) % len(self.plain.layers))
        return result

    def _fetch(self, index: int) -> None:
        if index in self._away:
            self._place(index, False)

    def _place(self, index: int, away: bool) -> list[Tensor]:
        """Make a layer's tensors anew on the host or the device; return those that it had."""
        before = self._tensors(index)
        with self._tracker.on_host() if away else contextlib.nullcontext():
            for name, tensor in zip(self.NAMES, before, strict=True):
                setattr(self.plain.layers[index], name, torch.empty_like(tensor))
        for tensor in () if away else self._tensors(index):
            self._tracker.mark(tensor, CACHE)
        (self._away.add if away else self._away.discard)(index)
        return before

    def _tensors(self, index: int) -> list[Tensor]:
        """Return a layer's keys and values; nothing if it has none yet, or keeps something else."""
        layer = self.plain.layers[index] if index < len(self.plain.layers) else None
        return [getattr(layer, name) for name in self.NAMES if isinstance(getattr(layer, name, None), Tensor)]

    def _nbytes(self, index: int) -> int:
        return sum(tensor.nbytes for tensor in self._tensors(index))


class Generated:
    """Stands in a dry run for the ``generate`` of a model of transformers (Rule 2).

    Args:
        model: The model.
        share: How often its answers are made, in a step.
    """

    def __init__(self, model: Any, share: float) -> None:
        self._model = model
        self._share = share

    def __call__(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Tensor:
        """Return the prompts with answers after them."""
        given = kwargs.pop("input_ids", inputs)
        mask = kwargs.pop("attention_mask", None)
        config = copy.deepcopy(generation_config or self._model.generation_config)
        tokens = kwargs.pop("max_new_tokens", None) or config.max_new_tokens
        tokens = tokens or (config.max_length or 0) - given.shape[1]
        if tokens < 1 or self._model.config.is_encoder_decoder:
            raise UnsupportedError(
                f"{type(self._model).__name__} generates, before it trains, what cannot be planned: answers of a "
                "decoder with max_new_tokens can"
            )
        whole = torch.cat([given, self._made_up(given, tokens)], dim=1)
        config.max_new_tokens, config.max_length, config.cache_implementation = 1, None, None
        cache, alone = None, {}
        if config.use_cache is not False:
            from transformers import DynamicCache

            cache = _CountedCache(DynamicCache(config=self._model.config), _here.tracker, False)
            alone = {"past_key_values": cache.plain}
        known = given.shape[1]
        for made, times in ((0, 1), (tokens // 2, tokens - 1), (tokens - 1, 0)):
            length = given.shape[1] + made
            if made == 0 or length > known:
                if cache is not None:
                    cache.lengthen(length - 1 - known)
                begins(self._share * times)
                masked = {} if mask is None else {"attention_mask": nn.functional.pad(mask, (0, made), value=1)}
                type(self._model).generate(
                    self._model, whole[:, :length], generation_config=config, **masked, **alone, **kwargs
                )
                known = length
        if cache is not None:
            cache.close()
        begins(self._share)
        return whole

    def _made_up(self, prompts: Tensor, tokens: int) -> Tensor:
        """Make answers of tokens that end none, and stand for no image."""
        config, settings = self._model.config, self._model.generation_config
        ends = settings.eos_token_id
        special = {*(ends if isinstance(ends, list) else [ends]), settings.pad_token_id}
        special |= {value for name, value in vars(config).items() if name.endswith(("token_id", "token_index"))}
        special = {token for token in special if isinstance(token, int)}
        vocabulary = config.get_text_config().vocab_size
        plain = next(token for token in range(vocabulary) if token not in special)
        ids = (torch.arange(len(prompts) * tokens) * STRIDE % vocabulary).reshape(len(prompts), tokens)
        return torch.where(torch.isin(ids, torch.tensor([*special], dtype=ids.dtype)), plain, ids).to(prompts.dtype)

"""A zoo of small models, one trait each: everything about a model that streaming its weights could get wrong.

`ZOO` maps names to `Case`s. A case builds its net on the CPU and brings its batches, its loss and its predictions, so
that a test can train any of them without knowing it. `ZooModule` is the LightningModule around a case and `loader` its
data. Nets are ordinary: parameters are registered normally and nothing in them knows how they will be run. Models of
libraries are in families.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

BATCH, FEATURES, WIDTH, HIDDEN, CLASSES = 4, 12, 24, 40, 5
VOCABULARY, LENGTH = 61, 8
IMAGE = 32


@dataclass(frozen=True)
class Case:
    """One model of the zoo with the data and the loss it is trained on.

    Args:
        name: The trait, as tests print it.
        make: Builds the net on the default device; equal seeds before it build equal nets.
        batch: Batch number i on the CPU, always the same; a tree of tensors that Lightning can move.
        loss: Runs the net on a batch and returns a scalar.
        predict: What predict_step returns for a batch.
        units: What to pass as the strategy's `units`.
        tags: The library that must be installed. "random": forward draws random numbers. "writes": forward writes into
            the net's own weights.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    predict: Callable[[nn.Module, Any], Any]
    units: Any = "auto"
    tags: frozenset[str] = frozenset()


class ZooModule(L.LightningModule):
    """Trains a case with an optimizer given by name; "two" is two optimizers at once, stepped by hand.

    `foreach` and `fused` choose the optimizer's implementation. They are always stated, because implementations differ
    in the last bit and torch's own choice depends on where the parameters are.
    """

    def __init__(
        self, case: Case, optimizer: str = "adamw", lr: float = 1e-2, foreach: bool = False, fused: bool = False
    ) -> None:
        super().__init__()
        self.case, self.optimizer_name, self.lr = case, optimizer, lr
        self.implementation = {"foreach": foreach, "fused": fused}
        self.automatic_optimization = optimizer != "two"
        self.net = case.make()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = self.case.loss(self.net, batch)
        self.log("loss", loss, batch_size=1)
        if not self.automatic_optimization:
            self.step_by_hand(loss)
        return loss

    def step_by_hand(self, loss: Tensor) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.log("val_loss", self.case.loss(self.net, batch), batch_size=1)

    def test_step(self, batch: Any, batch_index: int) -> None:
        self.log("test_loss", self.case.loss(self.net, batch), batch_size=1)

    def predict_step(self, batch: Any, batch_index: int) -> Any:
        return self.case.predict(self.net, batch)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        if self.optimizer_name == "two":
            return [self.make_optimizer("adamw", parameters[::2]), self.make_optimizer("sgd", parameters[1::2])]
        return self.make_optimizer(self.optimizer_name, parameters)

    def make_optimizer(self, name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if name == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9, **self.implementation)
        if name == "adamw":
            return torch.optim.AdamW(parameters, lr=self.lr, **self.implementation)
        if name == "adafactor" and not self.implementation["fused"]:
            return torch.optim.Adafactor(parameters, lr=self.lr, foreach=self.implementation["foreach"])
        if name == "adagrad":
            return torch.optim.Adagrad(parameters, lr=self.lr, **self.implementation)
        if name == "lbfgs" and not any(self.implementation.values()):
            # By the losses, which differ between ranks, it would end on one before another: DDP hangs.
            return torch.optim.LBFGS(parameters, lr=self.lr, max_iter=3, tolerance_change=0)
        known = "adagrad, sgd, adamw, adafactor, lbfgs, two"
        raise ValueError(f"no optimizer {name!r} with {self.implementation}; there are {known}")


def case(name: str) -> Case:
    """The case of that name."""
    return ZOO[name]


def loader(case: Case, n: int) -> DataLoader:
    """The case's first n batches, in order, as they are."""
    return DataLoader([case.batch(index) for index in range(n)], batch_size=None, shuffle=False)


# --- Batches: each from a generator of its own, so that neither order nor the global seed matters.


def generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + index)


def vectors(index: int) -> tuple[Tensor, Tensor]:
    random = generator(index)
    return torch.randn(BATCH, FEATURES, generator=random), torch.randint(CLASSES, (BATCH,), generator=random)


def sequences(index: int) -> tuple[Tensor, Tensor]:
    random = generator(index)
    return torch.randn(BATCH, LENGTH, FEATURES, generator=random), torch.randint(CLASSES, (BATCH,), generator=random)


def images(index: int) -> tuple[Tensor, Tensor]:
    random = generator(index)
    return torch.randn(BATCH, 3, IMAGE, IMAGE, generator=random), torch.randint(CLASSES, (BATCH,), generator=random)


def tokens(index: int) -> dict[str, Tensor]:
    identifiers = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator(index))
    return {"input_ids": identifiers, "labels": identifiers}


def described_vectors(index: int) -> dict[str, Any]:
    inputs, labels = vectors(index)
    shift = torch.randn(WIDTH, generator=generator(index))
    return {"inputs": inputs, "labels": labels, "shift": shift, "activation": ("gelu", "tanh")[index % 2]}


# --- Losses and predictions.


def classification(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def first_output(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return net(batch[0])


def next_token(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["input_ids"]).flatten(0, -2), batch["labels"].roll(-1, dims=1).flatten())


def token_scores(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return net(batch["input_ids"])


def described_scores(net: nn.Module, batch: dict[str, Any]) -> Tensor:
    return net(batch["inputs"], shift=batch["shift"], activation=batch["activation"])


def described_classification(net: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(described_scores(net, batch), batch["labels"])


def auxiliary_classification(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = classification(net, batch)
    return loss + 0.1 * sum(block.auxiliary_loss for block in net.blocks)


def regularised_classification(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return classification(net, batch) + 1e-2 * sum(parameter.square().sum() for parameter in net.parameters())


def penalised_classification(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if not torch.is_grad_enabled():
        return classification(net, batch)
    inputs = batch[0].detach().clone().requires_grad_()
    scores = net(inputs)
    slope = torch.autograd.grad(scores.sum(), inputs, create_graph=True)[0]
    return F.cross_entropy(scores, batch[1]) + 0.1 * (slope.norm(dim=-1) - 1).square().mean()


# --- The ordinary net, of which most others change one thing.


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """A stem, blocks one after the other, and a head."""

    def __init__(self, blocks: Iterable[nn.Module | None]) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.stem(x)))


class TokenStack(nn.Module):
    """A language model whose blocks are MLPs; its head may be its embedding."""

    def __init__(self, tied: bool = False, max_norm: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, max_norm=max_norm)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, identifiers: Tensor) -> Tensor:
        x = self.embedding(identifiers)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack_of(block: Callable[[], nn.Module], count: int = 4) -> Callable[[], nn.Module]:
    return lambda: Stack(block() for _ in range(count))


# --- Which parameters there are, and who shares them.


def frozen_prefix() -> nn.Module:
    net = Stack(Block() for _ in range(4))
    for module in (net.stem, net.blocks[0], net.blocks[1]):
        module.requires_grad_(False)
    return net


class AdaptedBlock(Block):
    """A frozen block with a small trainable side path: both kinds of parameter in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.shrink = nn.Linear(WIDTH, 2, bias=False)
        self.grow = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.grow(self.shrink(x))


def one_block_in_several_places() -> nn.Module:
    shared = Block()
    return Stack([shared, Block(), shared, Block(), shared])


class FunctionalHead(nn.Module):
    """Uses the embedding's weight in its own forward: no module that owns the weight is called for it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, identifiers: Tensor) -> Tensor:
        x = self.embedding(identifiers)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embedding.weight)


def weight_normed_block() -> nn.Module:
    """Has a pre-hook that computes `up.weight`, which is a plain attribute, from two parameters."""
    block = Block()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # old-style weight_norm is deprecated, and still met
        nn.utils.weight_norm(block.up)
    return block


def spectral_normed_block() -> nn.Module:
    """Has a parametrization with buffers that forward writes."""
    block = Block()
    nn.utils.parametrizations.spectral_norm(block.up)
    return block


# --- Which blocks run, how often, and how they are entered.


class RepeatedStack(Stack):
    """Visits its two blocks in turns, three times each."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = super().run(x)
        return x


class SkippingStack(Stack):
    """Leaves blocks out at random while training, as LayerDrop does."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) >= 0.4:
                x = block(x)
        return x


class ExpertBlock(nn.Module):
    """Sends every row to one of more experts than there are rows: some expert never gets any."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, BATCH + 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BATCH + 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        weight, choice = self.router(hidden).softmax(dim=-1).max(dim=-1)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            if rows.numel() > 0:
                update = weight[rows].unsqueeze(-1) * expert(hidden[rows])
                mixed = mixed.index_add(0, rows, update.to(mixed.dtype))
        return x + mixed


class EncodingBlock(nn.Module):
    """Is entered by `encode`, which uses a weight of its own and its children; it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(F.linear(self.norm(x), self.weight)))


class EncodingStack(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.encode(x)
        return x


class ChildrenOnlyStack(Stack):
    """Calls its blocks' children, never a block."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(F.gelu(block.up(block.norm(x))))
        return x


class NestedStack(Stack):
    """Has lists of blocks in a list, and a None where a block could be."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList([Block(), second, Block()]) for second in (None, Block()))

    def run(self, x: Tensor) -> Tensor:
        for stage in self.blocks:
            for block in stage:
                x = x if block is None else block(x)
        return x


class NamedStages(nn.Module):
    """Has its blocks as attributes, in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.first, self.second, self.third = Block(), Block(), Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(self.stem(x)))))


class CheckpointedStack(Stack):
    """Recomputes each block in backward, from outside the block."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(DroppingBlock() for _ in range(4))
        self.use_reentrant = use_reentrant

    def run(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().run(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class DroppingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


class NormedBatchBlock(nn.Module):
    """Has buffers that forward updates: two of floats, one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.linear(x)))


class UnevenConvnet(nn.Module):
    """Has stages whose weights differ four hundred times in size."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 4, 8, 32, 96)
        self.stages = nn.ModuleList(self.stage(*pair) for pair in pairwise(widths))
        self.head = nn.Linear(widths[-1], CLASSES)

    @staticmethod
    def stage(width_in: int, width_out: int) -> nn.Module:
        shrink = nn.Conv2d(width_in, width_out, 3, stride=2, padding=1)
        return nn.Sequential(shrink, nn.GELU(), nn.Conv2d(width_out, width_out, 3, padding=1), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(dim=(-2, -1)))


# --- What goes into a block and what comes out of it, by the front door and by side doors.


class ConfiguredBlock(Block):
    """Takes numbers, strings, None, and tensors inside a dict, by keyword."""

    def forward(
        self, x: Tensor, scale: float, *, activation: str, shift: Tensor | None, extras: dict[str, Any]
    ) -> Tensor:
        hidden = getattr(torch.nn.functional, activation)(self.up(self.norm(x)))
        if shift is not None:
            x = x + shift
        return x + scale * self.down(hidden) + extras["bias"] / extras["divisor"]


class ConfiguredStack(Stack):
    def forward(self, x: Tensor, *, shift: Tensor, activation: str = "gelu") -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            extras = {"bias": shift, "divisor": 4}
            x = block(x, 1 / (index + 1), activation=activation, shift=shift if index % 2 else None, extras=extras)
        return self.head(x)


@dataclass
class GatedOutput:
    hidden: Tensor
    gate: Tensor
    name: str


class GatedBlock(Block):
    """Returns a dataclass; its gate is used only after the last block."""

    def forward(self, x: Tensor) -> GatedOutput:
        hidden = super().forward(x)
        return GatedOutput(hidden=hidden, gate=hidden.sigmoid(), name="gated")


class GatedStack(Stack):
    def run(self, x: Tensor) -> Tensor:
        gates = []
        for block in self.blocks:
            output = block(x)
            x = output.hidden
            gates.append(output.gate)
        return x * torch.stack(gates).mean(dim=0)


class AuxiliaryBlock(Block):
    """Leaves a loss behind as an attribute: backward enters by it before it enters by the output."""

    auxiliary_loss: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        self.auxiliary_loss = hidden.logsumexp(dim=-1).square().mean()
        return x + self.down(F.gelu(hidden))


class Cache:
    """Keys and values of what was seen so far, one pair per block."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if index in self.pairs:
            past_key, past_value = self.pairs[index]
            key, value = torch.cat((past_key, key), dim=1), torch.cat((past_value, value), dim=1)
        self.pairs[index] = key, value
        return key, value


class CachingBlock(nn.Module):
    """Attends to what the cache holds, and puts its own keys and values there."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        key, value = cache.extend(self.index, self.key(x), self.value(x))
        return x + self.out(F.scaled_dot_product_attention(self.query(x), key, value))


class CachingStack(nn.Module):
    """Reads the first half for its cache alone: what that pass returns is thrown away, and backward enters it late."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(CachingBlock(index) for index in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def run(self, x: Tensor, cache: Cache) -> Tensor:
        for block in self.blocks:
            x = block(x, cache)
        return x

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        first, second = self.stem(x).chunk(2, dim=1)
        self.run(first, cache)
        return self.head(self.run(second, cache).mean(dim=1))


# --- How weights are read and written.


class LinearKeepingWeight(torch.autograd.Function):
    """Keeps the weight as an attribute of ctx, where saved-tensor hooks do not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        gradient = gradient.to(ctx.weight.dtype)
        return gradient @ ctx.weight, gradient.t() @ x.to(gradient.dtype)


class DetachableBlock(Block):
    def forward(self, x: Tensor, detached: bool = False) -> Tensor:
        if not detached:
            return super().forward(x)
        up, down = self.up.weight.detach(), self.down.weight.detach()
        return x + F.linear(F.gelu(F.linear(x, up)), down)


class DetachingStack(Stack):
    """Uses a block's weights detached before it uses them: backward needs them after their gradients are complete."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(self.blocks[2](x, detached=True))


class ContextBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(LinearKeepingWeight.apply(self.norm(x), self.weight))


class RescalingBlock(nn.Module):
    """Sets the rows of its weight to length one, in place, before it uses them in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def rescale(self) -> None:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.rescale()
        return x + F.gelu(F.linear(self.norm(x), self.weight))


class DataRescalingBlock(RescalingBlock):
    """Does so through `.data`: the weight's version counter does not move."""

    def rescale(self) -> None:
        self.weight.data.div_(self.weight.data.norm(dim=1, keepdim=True))


# --- Modules of torch that keep or read their weights in ways of their own.


class LSTMBlock(nn.Module):
    """Keeps its weights a second time, in the list that nn.LSTM hands to its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class AttentionBlock(nn.Module):
    """Holds an nn.MultiheadAttention, which reads the weights of a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.attention(hidden, hidden, hidden, need_weights=False)[0]


class SequenceStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.stem(x)).mean(dim=1))


class EncoderNet(nn.Module):
    """torch's own encoder, whose layers have a second path for evaluation that reads their children's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x)).mean(dim=1))


# --- Models of transformers, with random weights.


def transformer(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return make


# --- The zoo.


def traits() -> Iterator[Case]:
    """The nets above, each for the one thing it does."""

    def vector_case(name: str, make: Callable[[], nn.Module], *tags: str, **changes: Any) -> Case:
        given = {"batch": vectors, "loss": classification, "predict": first_output}
        return Case(name, make, **{**given, **changes}, tags=frozenset(tags))

    def token_case(name: str, make: Callable[[], nn.Module], *tags: str) -> Case:
        return Case(name, make, tokens, next_token, token_scores, tags=frozenset(tags))

    yield vector_case("mlp", stack_of(Block))
    yield token_case("tied_embedding", lambda: TokenStack(tied=True))
    yield vector_case("frozen_prefix", frozen_prefix)
    yield vector_case("adapters", stack_of(AdaptedBlock))
    yield vector_case("repeated_blocks", lambda: RepeatedStack([Block(), Block()]))
    yield vector_case("shared_block", one_block_in_several_places)
    yield vector_case("skipped_block", lambda: SkippingStack(Block() for _ in range(4)), "random")
    yield vector_case("mixture_of_experts", stack_of(ExpertBlock, 3))
    yield vector_case("dropout", stack_of(DroppingBlock), "random")
    yield vector_case("batch_norm", stack_of(NormedBatchBlock))
    yield vector_case("uneven_convnet", UnevenConvnet, batch=images)
    yield vector_case(
        "keyword_arguments",
        lambda: ConfiguredStack(ConfiguredBlock() for _ in range(4)),
        batch=described_vectors,
        loss=described_classification,
        predict=described_scores,
    )
    yield vector_case("dataclass_output", lambda: GatedStack(GatedBlock() for _ in range(4)))
    yield vector_case("auxiliary_attribute", stack_of(AuxiliaryBlock), loss=auxiliary_classification)
    yield token_case("weight_used_outside", FunctionalHead)
    yield vector_case("parameter_regulariser", stack_of(Block), loss=regularised_classification)
    yield vector_case("detached_weight", lambda: DetachingStack(DetachableBlock() for _ in range(4)))
    yield vector_case("weight_on_context", stack_of(ContextBlock))
    yield vector_case("method_entry", lambda: EncodingStack(EncodingBlock() for _ in range(4)))
    yield vector_case("children_only", lambda: ChildrenOnlyStack(Block() for _ in range(4)))
    yield vector_case("nested_lists", NestedStack)
    yield vector_case("no_module_list", NamedStages)
    yield vector_case("lstm", lambda: SequenceStack(LSTMBlock() for _ in range(3)), batch=sequences)
    yield vector_case(
        "multihead_attention", lambda: SequenceStack(AttentionBlock() for _ in range(3)), "random", batch=sequences
    )
    yield vector_case("transformer_encoder", EncoderNet, "random", batch=sequences)
    yield vector_case("rescaled_weight", stack_of(RescalingBlock), "writes")
    yield vector_case("rescaled_data", stack_of(DataRescalingBlock), "writes")
    yield token_case("max_norm_embedding", lambda: TokenStack(max_norm=1.0), "writes")
    yield vector_case("side_state", CachingStack, batch=sequences)
    yield vector_case("weight_norm", stack_of(weight_normed_block))
    yield vector_case("spectral_norm", stack_of(spectral_normed_block))
    yield vector_case("checkpoint", lambda: CheckpointedStack(use_reentrant=False), "random")
    yield vector_case("checkpoint_reentrant", lambda: CheckpointedStack(use_reentrant=True), "random")
    yield vector_case("gradient_penalty", stack_of(Block), loss=penalised_classification)


ZOO: dict[str, Case] = {case.name: case for case in traits()}

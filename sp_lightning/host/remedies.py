"""The changes that make room, or a step faster: what each is called in every message, and when there is one.

The code that offers a change tells in numbers what it takes and gains; nothing here measures. A change is named as the
user makes it. A function returns no remedy where its change cannot be made, or would change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Remedy(NamedTuple):
    """A change to a run."""

    what: str
    options: Mapping[str, Any]  # of the strategy, that it sets
    cost: str = ""  # what it costs, or does


_NO_OPTIONS: Mapping[str, Any] = {}
_LEAVES_LESS = {"keep": "recompute", "recompute": "recompute+offload", "offload": "recompute"}  # on the device
_COSTS = {"recompute": "each forward runs twice", "recompute+offload": "inputs of units go to the host and come back"}

ADAPTERS = Remedy("training adapters beside frozen weights", _NO_OPTIONS)
WIRE_AS_IS = Remedy("wire_dtype='as-is'", {"wire_dtype": "as-is"})
HALF_BATCHES = Remedy(
    "batches of half the size and accumulate_grad_batches twice as large",
    _NO_OPTIONS,
    "weights are loaded twice as often",
)


def window(size: int) -> Remedy:
    """Set the window."""
    costs = {1: "no weights are loaded while a unit computes", 2: "one unit is copied while another computes"}
    return Remedy(f"window={size}", {"window": size}, costs.get(size, ""))


def activations(policy: str) -> list[Remedy]:
    """Leave fewer activations on the device than this policy or, for "offload", recompute instead."""
    less = _LEAVES_LESS.get(policy)
    return [] if less is None else [Remedy(f"activations={less!r}", {"activations": less}, _COSTS[less])]


def smaller_units(classes: Sequence[str]) -> list[Remedy]:
    """Cut the model into units of these classes (`preflight.finer_classes`); none if there are none."""
    listed = list(classes)
    return [Remedy(f"units={listed}", {"units": listed}, "a window and gradients of smaller units")] if listed else []


def half_precision(single: bool) -> list[Remedy]:
    """Halve the bytes of weights and gradients on the device, of weights that are FP32 there."""
    what = "precision='bf16-true' and master_weights=True"
    return [Remedy(what, {"master_weights": True})] if single else []


@dataclass(frozen=True, kw_only=True)
class HostRemedy:
    """A change to a run that leaves less in host memory, with what to type; `FOLDER` is left to fill in."""

    what: str
    bits: str  # what it does to the numbers
    how: str  # what to type: in it MODEL, TOKENS (of a row) and ROWS (of a batch) are left to fill in
    options: Mapping[str, Any] = field(default_factory=dict)  # of the strategy, that it sets
    half: bool = False  # weights, gradients and state become bf16
    optimizer: str | None = None  # None: as it is
    adapters: bool = False  # frozen weights, beside which few are trained
    base_bits: int = 16  # of a frozen weight
    has_disk: bool = False  # optimizer state, and FP32 weights whose copies travel, go to a disk


# Bytes of state per parameter: of a factored one nearly none; of an 8-bit one a scale for each 256 numbers, too.
STATE_NBYTES = {"Adafactor": 0.0, "AdamW8bit": 2.03}
ADAPTED = 0.01  # share of the parameters that adapters train
_RECIPE = (
    "python -m sp_lightning fit --config examples/lora_llm/config.yaml --model.name_or_path MODEL --data.path my.jsonl "
    "--data.block_size TOKENS --data.batch_size ROWS --model.lr 1e-4 --trainer.max_epochs 1 "
    "--trainer.accumulate_grad_batches 1 --trainer.precision bf16-true"
)
_IN_BF16 = "weights, gradients and state are rounded to bf16, in which small updates are lost"
_MOMENTS = "its moments have 8 bits"
_FACTORED = "other updates than AdamW's"


def host(*, half: bool, wires: bool, activations: str, optimizer: str, masters: bool = False) -> Iterator[HostRemedy]:
    """Yield changes that free host memory, in the order of what they change.

    First what changes nothing, then the optimizer, the precision, and what is trained.

    Args:
        half: Whether weights are in half precision already, on the host too.
        wires: Whether there are wire copies that the run can do without.
        activations: The run's policy.
        optimizer: The optimizer's name.
        masters: Whether weights in half precision have copies in FP32 on the host.
    """
    if wires:
        yield HostRemedy(
            what=WIRE_AS_IS.what,
            bits="the same bits",
            how="--trainer.strategy.wire_dtype as-is",
            options=WIRE_AS_IS.options,
        )
    if "offload" in activations:
        yield HostRemedy(
            what="activations='recompute'",
            bits="the same bits",
            how="--trainer.strategy.activations recompute",
            options={"activations": "recompute"},
        )
    yield HostRemedy(
        what="disk=FOLDER",
        bits="the same bits",
        how="--trainer.strategy.disk FOLDER",
        options={"disk": "FOLDER"},
        has_disk=True,
    )
    precision, typed = ("", "") if half else ("precision='bf16-true'", "--trainer.precision bf16-true")
    rounded = "" if half else _IN_BF16
    adafactor, adam8 = "configure_optimizers: torch.optim.Adafactor", "configure_optimizers: bitsandbytes' AdamW8bit"
    factored = HostRemedy(what="Adafactor", bits=_FACTORED, how=adafactor, optimizer="Adafactor")
    if not half:
        if optimizer != factored.optimizer:
            yield factored
        yield HostRemedy(what=precision, bits=rounded, how=typed, half=True)
    if not half and not masters:
        yield HostRemedy(
            what=f"{precision}, master_weights=True and disk=FOLDER",
            bits="computed in bf16, stepped in FP32",
            how=f"{typed} --trainer.strategy.master_weights true --trainer.strategy.disk FOLDER",
            options={"master_weights": True, "disk": "FOLDER"},
            half=True,
            has_disk=True,
        )
    for what, name, bits, how in (
        ("Adafactor", "Adafactor", _FACTORED, adafactor),
        ("AdamW with 8-bit state", "AdamW8bit", _MOMENTS, adam8),
    ):
        if optimizer != name:
            yield HostRemedy(
                what=" and ".join(filter(None, (precision, what))),
                bits="; ".join(filter(None, (rounded, bits))),
                how=", ".join(filter(None, (typed, how))),
                half=True,
                optimizer=name,
            )
    yield HostRemedy(
        what="adapters on a frozen bf16 base",
        bits=f"about {ADAPTED:.0%} of the parameters are trained",
        how=f"{_RECIPE} --model.dtype bfloat16",
        half=True,
        adapters=True,
    )
    yield HostRemedy(
        what="adapters on a frozen base of 4 bits",
        bits=f"about {ADAPTED:.0%} of the parameters are trained, the others are rounded to 4 bits",
        how=f"{_RECIPE} --model.dtype bfloat16 --model.base_bits 4",
        half=True,
        adapters=True,
        base_bits=4,
    )

"""Models whose training step can be planned without making them: their units in numbers, from published configs.

A unit's costs are proportional to the tokens of a step (for a UNet: latent positions), except for the bytes of weights
and gradients. Products of activations with each other (attention's quadratic part) are left out: they only add compute.
So are the bytes of the device's memory that products move, and copies of gradients into the buffers of their way down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..core.machine import Machine
from ..core.simulation import floor
from ..core.unit_numbers import UnitNumbers

HALF, SINGLE = 2, 4  # bytes of a number in bf16 and in FP32
KINDS = "half", "mixed", "full"  # of precision


class Moved(NamedTuple):
    """Bytes of the device's memory that all but products read and write, for each token."""

    forward: float = 0.0
    backward: float = 0.0


# What dry runs of blocks of many sizes count of these bytes for a feature of each sort, by kind of precision, forward
# and backward. Of a decoder: of hidden states, of queries and keys, of those where they are normed, between the MLP's
# products, and of hidden states for each expert that a token chooses; of experts only half precision was traced.
DECODER = (
    ((84, 20, 36, 10, 26), (214, 32, 92, 18, 92)),
    ((106, 36, 48, 10, 26), (286, 58, 116, 18, 92)),
    ((80, 40, 28, 20, 52), (244, 64, 92, 36, 184)),
)
LOGITS = (((14,), (22,)), ((14,), (22,)), ((8,), (16,)))  # with their loss
TRANSFORMER = (((20, 4), (46, 8)), ((60, 4), (118, 8)), ((40, 8), (92, 16)))  # hidden states, and in the MLP
UNET = (((2.0,), (3.5,)), ((3.8,), (5.3,)), ((3.9,), (7.1,)))  # for a byte that half precision saves, of a whole UNet


def moved(counted: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...], *features: float) -> tuple[Moved, ...]:
    """Return these bytes by kind of precision, for a part with as many features of each sort."""

    def nbytes(each: tuple[float, ...]) -> float:
        return math.fsum(size * count for size, count in zip(each, features, strict=True))

    return tuple(Moved(nbytes(forward), nbytes(backward)) for forward, backward in counted)


NOTHING = moved(LOGITS, 0)


@dataclass(frozen=True)
class WorkloadPart:
    """A unit's numbers, for any number of tokens."""

    name: str
    parameters: int
    active: float  # parameters that a token is multiplied with, on average
    activation_nbytes: float = 0  # per token
    input_nbytes: float = 0  # per token
    resident: bool = False
    vocabulary: int = 0  # of a head, whose loss may be in chunks
    hidden: int = 0  # features that it is given
    largest: int = 0  # parameters in its largest weight
    moved: tuple[Moved, ...] = NOTHING  # by kind of precision

    def in_chunks(self, tokens: float) -> float:
        """Return a head's bytes of activations, for any number of tokens, with its loss in chunks of rows.

        Beside the logits of a chunk in two types there are a copy of its weight, and hidden states and their gradient.
        """
        rows = math.ceil(tokens / math.ceil(self.vocabulary / self.hidden))
        rows = 1 << (rows - 1).bit_length()  # torch's own choice
        return (HALF + 4) * self.vocabulary * rows + HALF * self.hidden * (self.vocabulary + 2 * tokens)


@dataclass(frozen=True)
class Workload:
    """A model's units, in the order of forward."""

    name: str
    parts: tuple[WorkloadPart, ...]
    uniform: bool  # whether all blocks are alike

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(part.parameters for part in self.parts)

    def units(
        self,
        tokens: float,
        up_bytes: int = HALF,
        down_bytes: int = HALF,
        chunked: bool = False,
        kind: str = "half",
    ) -> list[UnitNumbers]:
        """Return the units' costs in a step with this many tokens, for weights and gradients of these bytes each.

        The weights on the host are FP32.
        ``chunked``: the loss is in chunks, whose logits are made once more in backward.
        ``kind``: of precision, on which the bytes that the device moves depend.
        """
        of_kind = KINDS.index(kind)
        return [
            UnitNumbers(
                name=part.name,
                up_nbytes=part.parameters * up_bytes,
                down_nbytes=part.parameters * down_bytes,
                parameters=part.parameters,
                cast=part.parameters * (up_bytes < SINGLE),
                forward_flops=2 * part.active * tokens,
                backward_flops=(6 if chunked and part.vocabulary else 4) * part.active * tokens,
                activation_nbytes=round(
                    part.in_chunks(tokens) if chunked and part.vocabulary else part.activation_nbytes * tokens
                ),
                input_nbytes=round(part.input_nbytes * tokens),
                resident=part.resident,
                largest=part.largest,
                forward_other=part.moved[of_kind].forward * tokens,
                backward_other=part.moved[of_kind].backward * tokens,
            )
            for part in self.parts
        ]

    def tokens(self, machine: Machine, window: int, recompute: bool, into_forward: bool, margin: float) -> int:
        """Return the fewest tokens with which compute takes `margin` times as long as all that hides behind it.

        Forward and backward are compared separately. `into_forward`: whether the optimizer may hide behind forward too,
        or only behind backward.
        """
        one = floor(self.units(1), window, machine, recompute)
        behind = one.compute_backward + into_forward * one.compute_forward
        before = (not into_forward) * one.up_forward * machine.up_bytes_per_s / machine.host_bytes_per_s
        hidden = (
            one.up_forward / one.compute_forward,
            one.link_backward / one.compute_backward,
            one.optimizer / behind,
            (one.host - before) / behind,
        )
        return int(margin * max(hidden)) + 1


def decoder(
    name: str,
    *,
    hidden: int,
    layers: int,
    queries: int,
    keys: int,
    intermediate: int,
    vocabulary: int,
    experts: int = 1,
    chosen: int = 1,
    tied: bool = False,
    normed: bool = False,
) -> Workload:
    """Return a decoder with gated MLPs.

    `queries` and `keys` are features of all heads together. `tied`: the head multiplies with the embedding's table.
    `normed`: queries and keys are normed.
    """
    attention = 2 * hidden * queries + 2 * hidden * keys + 2 * hidden
    mlp = 3 * hidden * intermediate
    router = hidden * experts if experts > 1 else 0
    # Saved in bf16: inputs and outputs of norms, queries, keys, values, attention's output; in the MLP four tensors.
    saved = HALF * (6 * hidden + 2 * queries + 2 * keys + 4 * chosen * intermediate)
    table = vocabulary * hidden
    block = WorkloadPart(
        "block",
        attention + router + experts * mlp,
        attention + router + chosen * mlp,
        activation_nbytes=saved,
        input_nbytes=HALF * hidden,
        largest=hidden * max(intermediate, queries),
        moved=moved(
            DECODER,
            hidden,
            queries + keys,
            normed * (queries + keys),
            chosen * intermediate,
            (experts > 1) * chosen * hidden,
        ),
    )
    logits, of_loss = (HALF + 4) * vocabulary, moved(LOGITS, vocabulary)  # and their FP32 softmax
    if 4 * table < block.parameters:  # small beside a block: both stay on the device, and travel as one
        embedding = WorkloadPart("embedding and head", 2 * table, 0, resident=True, largest=table)
        head = WorkloadPart("head", 0, table, logits, HALF * hidden, True, vocabulary, hidden, moved=of_loss)
    else:
        embedding = WorkloadPart("embedding", table, 0, largest=table)
        own = 0 if tied else table
        head = WorkloadPart("head", own, table, logits, HALF * hidden, tied, vocabulary, hidden, own, of_loss)
    return Workload(name, (embedding, *_numbered(block, layers), head), uniform=True)


def vision_transformer(name: str, *, hidden: int, layers: int, intermediate: int, patch: int, classes: int) -> Workload:
    """Return a ViT; all but its blocks is small and stays on the device."""
    attention = 4 * hidden * (hidden + 1)
    block = WorkloadPart(
        "block",
        attention + 2 * hidden * intermediate + intermediate + hidden + 4 * hidden,
        attention + 2 * hidden * intermediate,
        activation_nbytes=HALF * (8 * hidden + 2 * intermediate),
        input_nbytes=HALF * hidden,
        largest=hidden * intermediate,
        moved=moved(TRANSFORMER, hidden, intermediate),
    )
    embedding, head = 3 * patch * patch * hidden, hidden * classes
    parameters = embedding + 2 * hidden + head + classes
    root = WorkloadPart("embedding and head", parameters, embedding, resident=True, largest=max(embedding, head))
    return Workload(name, (root, *_numbered(block, layers)), uniform=True)


def sdxl_unet() -> Workload:
    """Return the UNet of SDXL, from 320 features at every latent position to 1280 at every sixteenth."""

    def resnet(inputs: int, outputs: int, share: float) -> WorkloadPart:
        weights = 9 * inputs * outputs + 9 * outputs * outputs + (inputs * outputs if inputs != outputs else 0)
        saved = HALF * share * (3 * inputs + 4 * outputs)
        largest = 9 * max(inputs, outputs) * outputs
        inputs_nbytes = HALF * share * inputs
        return part("resnet", weights + 1280 * outputs, weights * share, saved, inputs_nbytes, largest)

    def transformer(width: int, blocks: int, share: float) -> Iterator[WorkloadPart]:
        weights = 18 * width * width + 2 * 2048 * width  # self and cross attention to 2048 features, a gated MLP
        saved = HALF * share * (12 * width + 3 * 4 * width)
        for _ in range(blocks):
            inputs_nbytes = HALF * share * width
            yield part("transformer", weights, weights * share, saved, inputs_nbytes, 8 * width * width)

    def resample(width: int, share: float) -> WorkloadPart:
        weights, saved = 9 * width * width, HALF * share * width
        return part("resample", weights, weights * share, saved, saved, weights)

    def part(name: str, weights: int, active: float, saved: float, inputs: float, largest: int) -> WorkloadPart:
        return WorkloadPart(name, weights, active, saved, inputs, largest=largest, moved=moved(UNET, saved))

    half, quarter = 1 / 4, 1 / 16  # shares of the positions at half and a quarter of the resolution
    parts = [
        # First and last convolution, time and size embeddings.
        WorkloadPart("ends", 7_000_000, 23_000, resident=True, largest=1280 * 1280),
        *(resnet(320, 320, 1), resnet(320, 320, 1), resample(320, half)),
        *(resnet(320, 640, half), *transformer(640, 2, half), resnet(640, 640, half), *transformer(640, 2, half)),
        resample(640, quarter),
        *(resnet(640, 1280, quarter), *transformer(1280, 10, quarter)),
        *(resnet(1280, 1280, quarter), *transformer(1280, 10, quarter)),
        *(resnet(1280, 1280, quarter), *transformer(1280, 10, quarter), resnet(1280, 1280, quarter)),
        *(resnet(2560, 1280, quarter), *transformer(1280, 10, quarter)),
        *(resnet(2560, 1280, quarter), *transformer(1280, 10, quarter)),
        *(resnet(1920, 1280, quarter), *transformer(1280, 10, quarter), resample(1280, half)),
        *(resnet(1920, 640, half), *transformer(640, 2, half)),
        *(resnet(1280, 640, half), *transformer(640, 2, half)),
        *(resnet(960, 640, half), *transformer(640, 2, half), resample(640, 1)),
        *(resnet(960, 320, 1), resnet(640, 320, 1), resnet(640, 320, 1)),
    ]
    return Workload("sdxl", tuple(_named(parts)), uniform=False)


def _numbered(block: WorkloadPart, count: int) -> Iterator[WorkloadPart]:
    return _named([block] * count)


def _named(parts: list[WorkloadPart]) -> Iterator[WorkloadPart]:
    for index, part in enumerate(parts):
        yield replace(part, name=f"{part.name} {index}")


# From the models' published config.json files.
WORKLOADS = {
    workload.name: workload
    for workload in (
        decoder(
            "llama-1b",
            hidden=2048,
            layers=16,
            queries=2048,
            keys=512,
            intermediate=8192,
            vocabulary=128256,
            tied=True,
        ),
        decoder(
            "llama-3b",
            hidden=3072,
            layers=28,
            queries=3072,
            keys=1024,
            intermediate=8192,
            vocabulary=128256,
            tied=True,
        ),
        decoder("llama3-8b", hidden=4096, layers=32, queries=4096, keys=1024, intermediate=14336, vocabulary=128256),
        decoder("llama3-70b", hidden=8192, layers=80, queries=8192, keys=1024, intermediate=28672, vocabulary=128256),
        decoder(
            "qwen3-14b",
            hidden=5120,
            layers=40,
            queries=5120,
            keys=1024,
            intermediate=17408,
            vocabulary=151936,
            normed=True,
        ),
        decoder(
            "qwen3-32b",
            hidden=5120,
            layers=64,
            queries=8192,
            keys=1024,
            intermediate=25600,
            vocabulary=151936,
            normed=True,
        ),
        decoder(
            "mixtral-8x7b",
            hidden=4096,
            layers=32,
            queries=4096,
            keys=1024,
            intermediate=14336,
            vocabulary=32000,
            experts=8,
            chosen=2,
        ),
        vision_transformer("vit-h", hidden=1280, layers=32, intermediate=5120, patch=14, classes=1000),
        sdxl_unet(),
    )
}

# Names of shapes (shapes.py) that have listed numbers, too, under another name: one name for one model.
SAME = {"llama-8b": "llama3-8b", "llama-70b": "llama3-70b"}


def listed(name: str) -> Workload | None:
    """Return the listed numbers of a model, by either of its names; None if it has none."""
    return WORKLOADS.get(SAME.get(name, name))

"""Compare with the tools in use today on the same work: FSDP2's CPU offload, DeepSpeed, torchao, accelerate.

    python benchmarks/gpu/peers.py [--minutes 9]

Comparisons are of training, of a forward, or of answers, for which eight batches share each trip, too; a peer that
cannot run is listed with its error. Bars: 3 x the tokens per second of FSDP2's and DeepSpeed ZeRO-3's offload, each in
at most its device memory, and in a forward 1.5 x accelerate's, with diffusers' group offloading for comparison.
"""

from __future__ import annotations

import sys

from measured import Comparison, ahead, begin, others, ours, parser

TRAINING = {"precision": "bf16-mixed", "optimizer": "adamw", "seq": 2048, "steps": 3, "repetitions": 2}
INFERENCE = {"precision": "bf16-true", "inference": True, "seq": 2048, "steps": 5, "repetitions": 2}
ANSWERS = {**INFERENCE, "seq": 512, "answer": 64, "steps": 1}
OFFLOADING = ["fsdp2", "deepspeed"]


def training(model: str, batch: int, *more: str) -> Comparison:
    setting = {**TRAINING, "model": model, "batch": batch, "activations": "recompute"}
    rows = [*ours(2, 4), *others(*OFFLOADING, *more)]
    return Comparison(f"{model}, training, {batch * 2048} tokens", setting, rows, [ahead(OFFLOADING, 3)])


def inference(model: str, batch: int) -> Comparison:
    setting = {**INFERENCE, "model": model, "batch": batch}
    rows = [*others("plain", "accelerate", "group-offload"), *ours(2, 4)]
    return Comparison(f"{model}, inference, {batch * 2048} tokens", setting, rows, [ahead(["accelerate"], 1.5)])


def answers(model: str, batch: int) -> Comparison:
    setting = {**ANSWERS, "model": model, "batch": batch}
    rows = [*others("plain", "accelerate", "group-offload"), *ours(2), *ours(2, at_once=8)]
    return Comparison(f"{model}, answers of 64 tokens, {batch} rows in a batch", setting, rows)


COMPARISONS = [
    training("llama-3b", 4),
    inference("llama-3b", 1),
    answers("llama-8b", 4),
    training("llama-1b", 4, "zero-offload", "superoffload", "torchao"),
    training("llama-3b", 16),
    inference("llama-8b", 1),
]


def main() -> int:
    options = parser(__doc__).parse_args()
    return begin("peers", options, COMPARISONS)


if __name__ == "__main__":
    sys.exit(main())

"""Compare with the tools in use today on the same work: FSDP2's CPU offload and DeepSpeed's ZeRO-3 offload.

    python benchmarks/gpu/peers.py [--minutes 9]

Gradients are clipped. A peer that cannot run is listed with its error. Bar: 3 x the tokens per second of each, in at
most its device memory.
"""

from __future__ import annotations

import sys

from measured import Comparison, ahead, begin, others, ours, parser

TRAINING = {"precision": "bf16-mixed", "seq": 2048, "steps": 3, "repetitions": 2}
OFFLOADING = ["fsdp2", "deepspeed"]


def training(model: str, batch: int) -> Comparison:
    setting = {**TRAINING, "model": model, "batch": batch, "activations": "recompute"}
    rows = [*ours(2, 4, "auto"), *others(*OFFLOADING)]
    return Comparison(f"{model}, training, {batch * 2048} tokens", setting, rows, [ahead(OFFLOADING, 3)])


COMPARISONS = [
    training("llama-3b", 4),
    training("llama-1b", 4),
    training("llama-3b", 16),
]


def main() -> int:
    options = parser(__doc__).parse_args()
    return begin("peers", options, COMPARISONS)


if __name__ == "__main__":
    sys.exit(main())

"""Measure memory and time for windows and transfers, beside plain Lightning: the paper's trade-off.

    python benchmarks/gpu/paper.py [--only vit] [--minutes 9]

A language model, one that reads text and images, and a vision model. Bar: 60 % less device memory at less than 1.2 x
plain's time.
"""

from __future__ import annotations

import sys

from measured import Comparison, begin, memory, others, ours, parser

MODELS = {
    "llama-1b": {"batch": 4, "seq": 2048},
    "llava-1b": {"batch": 4, "seq": 1024},
    "vit-h": {"batch": 64, "seq": 1},
}
SIZES = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2))  # window and transfer


def traded(model: str) -> Comparison:
    setting = {**MODELS[model], "model": model, "precision": "bf16-mixed", "activations": "recompute"}
    setting |= {"steps": 3, "repetitions": 1}
    rows = [*others("plain"), *(row for window, transfer in SIZES for row in ours(window, transfer=transfer))]
    return Comparison(f"{model}, windows and transfers", setting, rows, [memory(0.60, 1.2)])


def main() -> int:
    return begin("paper", parser(__doc__).parse_args(), [traded(model) for model in MODELS])


if __name__ == "__main__":
    sys.exit(main())

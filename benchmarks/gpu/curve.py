"""Measure memory against time for k = 1 .. 12, "auto", and k' = 1 .. 4: the paper's trade-off; publish.py draws it.

python benchmarks/gpu/curve.py [--model llama-1b|llama-3b] [--minutes 9]
"""

from __future__ import annotations

import sys

from measured import Comparison, Row, begin, others, ours, parser

MODELS = {"llama-1b": {"batch": 4, "seq": 2048}, "llama-3b": {"batch": 4, "seq": 2048}}
WINDOWS = (1, 2, 3, 4, 8, 12)
TRANSFERS = (1, 2, 4)


def rows() -> list[Row]:
    """Make the rows of plain Lightning and of all pairs of k and k'."""
    made = [row for k in TRANSFERS for row in ours(*(window for window in WINDOWS if window >= k), transfer=k)]
    return [*others("plain"), *made, *ours("auto")]


def curve(model: str, work: dict[str, int]) -> Comparison:
    setting = {**work, "model": model, "precision": "bf16-mixed", "steps": 3, "repetitions": 1}
    return Comparison(f"{model}, all windows", setting, rows())


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--model", choices=MODELS, action="append", help="model, may be repeated (default: all)")
    options = arguments.parse_args()
    return begin("curve", options, [curve(model, MODELS[model]) for model in options.model or MODELS])


if __name__ == "__main__":
    sys.exit(main())

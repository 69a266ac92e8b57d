"""Call Llama 3B in bf16, and let it answer, where all of it fits on the device and where little does.

    python benchmarks/gpu/infer.py [--only generate] [--minutes 9]

Bars: where it fits, plain's time from the second call on; in 4 GiB the time in which the link moves what exceeds them.
"""

from __future__ import annotations

import sys

from measured import Comparison, begin, excess, others, ours, parser

WITHIN = 0.1


def called(door: str, limit: str | None) -> Comparison:
    setting = {"model": "llama-3b", "batch": 1, "seq": 2048, "precision": "bf16-true", "door": door}
    setting |= {"device_memory": limit, "steps": 5, "repetitions": 2}
    return Comparison(
        f"llama-3b, {door}, {limit or 'no limit'}", setting, others("plain") + ours("auto"), [excess(WITHIN)]
    )


def main() -> int:
    comparisons = [called(door, limit) for door in ("forward", "generate") for limit in (None, "4GiB")]
    return begin("infer", parser(__doc__).parse_args(), comparisons)


if __name__ == "__main__":
    sys.exit(main())

"""Train adapters of rank 16 for Llama 8B in bf16, in 12 GiB of device memory, beside the model on the device.

    python benchmarks/gpu/lora.py [--device-memory 12GiB] [--minutes 9]

The process cannot exceed the limit; the plain run has all memory. Bar: 0.9 of its speed, at 4,096 tokens a step.
"""

from __future__ import annotations

import sys

from measured import Comparison, begin, others, ours, parser, speed


def adapted(nbytes: str) -> Comparison:
    setting = {"model": "llama-8b", "rank": 16, "batch": 2, "seq": 2048, "precision": "bf16-true"}
    setting |= {"activations": "recompute", "device_memory": nbytes, "steps": 3, "repetitions": 2}
    return Comparison(
        f"llama-8b, 4096 tokens, adapters in {nbytes}", setting, others("plain") + ours("auto"), [speed(0.9)]
    )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--device-memory", default="12GiB", help="limit (default: 12GiB)")
    options = arguments.parse_args()
    return begin("lora", options, [adapted(options.device_memory)])


if __name__ == "__main__":
    sys.exit(main())

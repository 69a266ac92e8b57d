"""Train the largest model that fits in host memory, in full with FP32 AdamW, in little device memory.

    python benchmarks/gpu/big.py [--device-memory 24GiB 16GiB] [--minutes 9]

The model has as many blocks of Llama 3.1 8B as fit: 18 bytes of host memory a parameter, with a tenth to spare. The
process cannot exceed the limit on device memory; it trains a sequence for each 6 GiB, whose logits alone take over 3.
"""

from __future__ import annotations

import sys

from measured import Comparison, begin, merit, ours, parser
from shapes import CONFIGS

from sp_lightning.host.machine import host_memory
from sp_lightning.options import parse_bytes

HOST_BYTES = 18
SEQUENCE = 6 << 30  # device bytes a sequence
BLOCK, TABLES = 218_112_000, 2 * 128256 * 4096


def layers() -> int:
    """Count the blocks that fit."""
    parameters = 0.9 * host_memory().free / HOST_BYTES
    return max(1, min(CONFIGS["llama-8b"]["num_hidden_layers"], int((parameters - TABLES) // BLOCK)))


def limited(nbytes: str, count: int) -> Comparison:
    batch = max(1, parse_bytes(nbytes, "device_memory") // SEQUENCE)
    work = {"model": f"llama-8b:{count}", "batch": batch, "seq": 2048}
    setting = {**work, "precision": "bf16-mixed"}
    setting |= {"activations": "recompute", "device_memory": nbytes, "steps": 2, "repetitions": 1}
    return Comparison(f"llama-8b of {count} blocks in {nbytes}", setting, ours(2), [merit(0.85)])


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--device-memory", nargs="+", default=["24GiB", "16GiB"], help="limits, one after another")
    arguments.add_argument("--blocks", type=int, help="number of blocks (default: as many as fit in free host memory)")
    options = arguments.parse_args()
    count = options.blocks or layers()
    return begin("big", options, [limited(nbytes, count) for nbytes in options.device_memory])


if __name__ == "__main__":
    sys.exit(main())

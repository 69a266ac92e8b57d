"""Plan the largest batches of language models in 12, 16 and 24 GiB, with all logits at once and with a loss in chunks.

    python benchmarks/largest_batches.py [MODEL ...]

The table is README's. Nothing is measured: each cell is what `python -m sp_lightning plan --loss ...
--device-memory ...` prints, with recompute on an A100's profile, whose host has room for all of these models.
"""

import sys

from sp_lightning.commands.model_spec import find
from sp_lightning.core.machine import MACHINES
from sp_lightning.planning import plan

MODELS = ("llama-1b", "llama-3b", "llama3-8b", "qwen3-14b")
SIZES = ("12GiB", "16GiB", "24GiB")
LENGTH = 2048  # tokens in a row
ROWS = 4  # of the batches that are traced


def tokens(model: str, size: str, loss: str) -> str:
    """Return the tokens of the largest batch, in whole rows of 2,048."""
    spec = find(model, ROWS, LENGTH)
    found = plan(
        spec.model,
        spec.batch,
        precision="bf16-mixed",
        machine=MACHINES["a100"],
        device_memory=size,
        loss=loss,
        window=2,
        activations="recompute",
    )
    assert found.largest_batch is not None
    rows = found.largest_batch if found.counted == "rows" else found.largest_batch // LENGTH
    return f"{rows * LENGTH:,}" if rows else "none"


def main() -> None:
    """Print the table in Markdown."""
    print("| tokens in a step, all logits -> in chunks | " + " | ".join(SIZES) + " |")
    print("| --- " * (len(SIZES) + 1) + "|")
    for model in sys.argv[1:] or MODELS:
        cells = (" -> ".join(tokens(model, size, loss) for loss in ("full", "chunked")) for size in SIZES)
        print(f"| {model} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

"""Compare the peak of torch's CUDA allocator with the plan, for models of real size, without a GPU.

    python benchmarks/device_peaks.py [--only llama-8b]

Every process runs torch's CUDA code on a runtime whose kernels do nothing (tests/rigs/nullcuda): memory is allocated
and freed as on a GPU, but hardly touched. Models have their real width and few blocks, so that they fit into 14 GiB of
host memory; the device's peak hardly depends on the number of blocks. Times are the host's alone.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("tests/rigs", "benchmarks/gpu", "benchmarks/bench"))]

SETTINGS: list[tuple[str, int, int, str, int, str | None]] = [
    # model, batch, tokens of each, activations, window, limit of the device's memory
    ("llama-1b:4", 4, 2048, "recompute", 2, "24GiB"),
    ("llama-1b:4", 2, 8192, "recompute", 3, None),
    ("llama-3b:4", 2, 2048, "recompute+offload", 1, None),
    ("llama-3b:4", 2, 2048, "recompute+offload", 2, None),
    ("llama-1b:4", 2, 2048, "offload", 2, None),
    ("llama-1b:4", 2, 2048, "keep", 2, None),
]


def measure(only: str) -> None:
    """Measure the settings whose model has this in its name, on the null CUDA runtime."""
    import predicted
    from compare import compare, ours, setting_of

    from sp_lightning.core.machine import MACHINES
    from sp_lightning.options import format_bytes, parse_bytes

    for model, batch, seq, activations, window, limit in SETTINGS:
        if only not in model:
            continue
        work = {"model": model, "batch": batch, "seq": seq, "activations": activations}
        once = {"precision": "bf16-mixed", "steps": 1, "repetitions": 1, "device": "cuda"}
        setting = setting_of(**work, **once, device_memory=limit and parse_bytes(limit, "device_memory"))
        (row,) = rows = ours(window)
        compare(setting, rows, lambda line: None)
        label = f"{model}, {batch} x {seq}, {activations}, window {window}"
        if row.error is not None:
            sys.stdout.write(f"{label}: {row.error}\n")
            continue
        (plan,) = predicted.beside(setting, MACHINES["h200"], rows)
        sys.stdout.write(
            f"{label}: allocated {format_bytes(row.most('device_peak'))}, plan {format_bytes(plan['device_nbytes'])} "
            f"({plan['device_off']:+.2%}), reserved by the allocator {format_bytes(row.most('reserved_peak'))}\n"
        )
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models with this in their name")
    options = parser.parse_args()
    if "nullcuda" not in os.environ.get("LD_PRELOAD", ""):
        import nullcuda

        os.execve(sys.executable, [sys.executable, *sys.argv], nullcuda.environment())
    measure(options.only)


if __name__ == "__main__":
    main()

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
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rigs"), str(ROOT / "benchmarks" / "gpu")]

SETTINGS: list[
    tuple[str, int, int, str, int, dict[str, str]]
] = [  # model, batch, tokens of each, activations, window, others
    ("llama-8b:1", 4, 2048, "recompute", 2, {"device_memory": "24GiB", "optimizer": "sgd"}),
    ("llama-8b:1", 2, 2048, "recompute", 2, {"device_memory": "16GiB", "optimizer": "sgd"}),
    ("llama-1b:4", 2, 8192, "recompute", 3, {}),
    ("llama-3b:4", 2, 2048, "recompute+offload", 1, {}),
    ("llama-3b:4", 2, 2048, "recompute+offload", 2, {}),
    ("llama-1b:4", 2, 2048, "offload", 2, {}),
    ("llama-1b:4", 2, 2048, "keep", 2, {}),
    ("vit-h:8", 64, 257, "recompute", 2, {}),
]


def measure(only: str) -> None:
    """Measure the settings whose model has this in its name, on the null CUDA runtime."""
    import predicted

    from sp_lightning import bench
    from sp_lightning.options import format_bytes

    for model, batch, seq, activations, window, others in SETTINGS:
        if only not in model:
            continue
        work = {"model": model, "batch": batch, "seq": seq, "activations": activations, **others}
        once = {"precision": "bf16-mixed", "steps": 1, "repetitions": 1, "device": "cuda"}
        setting = bench.Setting.parse(**work, **once)
        result = bench.compare(setting, [bench.Entry("superpipeline", {"window": window})], lambda line: None)
        (row,) = result.rows
        label = f"{model}, {batch} x {seq}, {activations}, window {window}"
        if row.error is not None:
            sys.stdout.write(f"{label}: {row.error}\n")
            continue
        (plan,) = predicted.beside(result, [row])
        repetition = row.repetitions[0]
        sys.stdout.write(
            f"{label}: allocated {format_bytes(row.device_peak)}, plan {format_bytes(plan['device_nbytes'])} "
            f"({plan['device_off']:+.2%}), reserved by the allocator {format_bytes(repetition['reserved_peak'])}\n"
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

"""Time an optimizer's step on the host in every way that the library knows, on an idle machine and on a busy one.

    python benchmarks/host_optimizer.py [--optimizer AdamW] [--elements 1 5 20 50] [--busy 0 2 4 8] [--repeat 9]

`loop` is torch's default step, `pieces` is the same cut into cache-sized pieces, `compiled` is native.cpp, and `fused`
is torch's fused kernel, whose bits are different. All but `fused` must have the loop's bits after every step, or
nothing is printed. Each repetition times all of them in turn; the table has the medians in milliseconds, and of the
ratios within a repetition. Beside them as many processes as --busy says compute all the time.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch

from sp_lightning.optim import native, pieces

FEWEST = native.FEWEST
WAYS = ("loop", "pieces", "compiled", "fused")
BUSY = "import torch\ntorch.set_num_threads(1)\nx = torch.randn(1 << 16)\nwhile True: x.mul_(1.0001).clamp_(-1, 1)"


@contextlib.contextmanager
def busy(count):
    """Keep as many processes computing."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        time.sleep(3 if processes else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def optimizers(cls, elements):
    """Make the same optimizer once for each way."""
    made = {}
    for way in WAYS:
        torch.manual_seed(0)
        # A transformer's block has matrices and vectors.
        shapes = [(elements // 8 // 1024, 1024)] * 8 + [(1024,)] * 8
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        made[way] = cls(params, lr=1e-3, **({"momentum": 0.9} if cls is torch.optim.SGD else {}))
        for group in made[way].param_groups:
            group["fused"] = True if way == "fused" else None
    return made


def measure(cls, elements, repeat):
    """Return the milliseconds of each repetition, by way."""
    made = optimizers(cls, elements)
    shadows = {way: pieces.step_in_pieces(made[way]) for way in ("pieces", "compiled")}
    native.LIBRARY.steps(made["compiled"], made["compiled"].param_groups[0])
    native.LIBRARY.wait()
    if native.LIBRARY.failure:
        raise SystemExit(f"no compiled code: {native.LIBRARY.failure}")
    times = {way: [] for way in WAYS}
    for step in range(repeat + 2):
        for index in range(len(made["loop"].param_groups[0]["params"])):
            grad = torch.randn_like(made["loop"].param_groups[0]["params"][index])
            for optimizer in made.values():
                optimizer.param_groups[0]["params"][index].grad = grad.clone()
        for way in WAYS if step % 2 else reversed(WAYS):
            native.FEWEST = FEWEST if way == "compiled" else sys.maxsize
            start = time.perf_counter()
            made[way].step()
            times[way].append((time.perf_counter() - start) * 1e3)
        for way in ("pieces", "compiled"):
            for ours, loops in zip(
                made[way].param_groups[0]["params"], made["loop"].param_groups[0]["params"], strict=True
            ):
                assert native.same_bits(ours, loops), f"{way} differs from the loop in step {step}"
    for shadow in shadows.values():
        shadow.close()
    native.FEWEST = FEWEST
    return {way: values[2:] for way, values in times.items()}  # the first make state and touch memory


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", default="AdamW", choices=[cls.__name__ for cls in native.RECIPES])
    parser.add_argument("--elements", type=int, nargs="+", default=[1, 5, 20, 50], help="millions")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    cls = getattr(torch.optim, options.optimizer)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'busy':>4} {'M':>3}", *(f"{way:>9}" for way in WAYS), "  pieces: x loop   compiled: x fused")
    rows = []
    for count in options.busy:
        with busy(count):
            for millions in options.elements:
                times = measure(cls, millions * 1_000_000, options.repeat)
                medians = {way: statistics.median(values) for way, values in times.items()}

                def speed(way, other, times=times):
                    return statistics.median(b / a for a, b in zip(times[way], times[other], strict=True))

                row = {"busy": count, "millions": millions, "ms": medians}
                row |= {"pieces_to_loop": speed("pieces", "loop"), "compiled_to_fused": speed("compiled", "fused")}
                rows.append(row)
                print(
                    f"{count:>4} {millions:>3}",
                    *(f"{medians[way]:>9.2f}" for way in WAYS),
                    f"{row['pieces_to_loop']:>16.2f} {row['compiled_to_fused']:>18.2f}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

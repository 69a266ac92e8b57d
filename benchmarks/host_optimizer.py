"""Measure a clipped AdamW step on the host beside the least that memory and a core allow, all in one run.

    python benchmarks/host_optimizer.py [--elements 50000000] [--json FILE]

Each row is a ratio of times of the same work in turns: the compiled step with gradients in bfloat16, a clip factor and
a wire copy, 28 bytes a parameter, beside a loop that reads and writes the same bytes; the same from a core's cache
beside a plain loop by the textbook's formula; and the step beside two busy processes beside the step alone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import multiprocessing
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sp_lightning.optim import compiled

HERE = pathlib.Path(__file__).parent
IN_CACHE = 1 << 15  # elements, whose 20 bytes each fit a core's second-level cache
IN_ONE = 100  # steps in one call, so that little of its time is the call's
ROUNDS = 9
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")


class Memory:
    """Weights with their state, gradients and wire copies."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.value, self.mean = torch.randn(elements), torch.zeros(elements)
        self.square = torch.rand(elements) * 1e-4
        self.grad, self.wire = torch.randn(elements).bfloat16(), torch.empty(elements, dtype=torch.bfloat16)
        self.group = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]

    @property
    def pointers(self) -> list[ctypes.c_void_p]:
        tensors = (self.value, self.mean, self.square, self.grad, self.wire)
        return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]

    def step(self, times: int = 1) -> None:
        """Step as the thread of the steps does: so many times in one call."""
        loop = compiled.LOOPS[torch.optim.AdamW](self.group, False)
        state = {"exp_avg": self.mean, "exp_avg_sq": self.square}
        one = compiled.Stepped(self.value, self.grad, 0.5, state, 10.0, loop.flags, self)  # type: ignore[arg-type]
        compiled._run(loop, loop.flags, [one] * times)

    is_narrow = True  # whether there is a wire copy, as a weight says it


def plain_loops() -> Any:
    """Compile the loops beside this file."""
    path = pathlib.Path(tempfile.mkdtemp()) / "passes.so"
    subprocess.run(["c++", *FLAGS, str(HERE / "passes.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def on_all_threads(loop: Any, memory: Memory) -> Callable[[], None]:
    """Return a call that runs a plain loop on torch's number of threads."""
    count = torch.get_num_threads()
    ends = [memory.elements * part // count for part in range(count + 1)]
    pool = ThreadPoolExecutor(count)

    def run() -> None:
        parts = [
            pool.submit(loop, *memory.pointers, ctypes.c_int64(begin), ctypes.c_int64(end))
            for begin, end in itertools.pairwise(ends)
        ]
        for part in parts:
            part.result()

    return run


def seconds(call: Callable[[], Any], times: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times


def ratio(one: Callable[[], Any], other: Callable[[], Any], times: int = 1) -> float:
    """Return how many times as long the first call takes, from turns of both."""
    one(), other()
    return statistics.median(seconds(one, times) / seconds(other, times) for _ in range(ROUNDS))


def spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def two_busy_processes() -> Iterator[None]:
    """Run two processes that compute all the time."""
    processes = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    time.sleep(2)
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=50_000_000)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    loops, memory, cached = plain_loops(), Memory(arguments.elements), Memory(IN_CACHE)
    traffic = on_all_threads(loops.traffic, Memory(arguments.elements))  # which makes squares negative, and steps NaN
    found = {"step / the same traffic": ratio(memory.step, traffic)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pointers, bounds = cached.pointers, (ctypes.c_int64(0), ctypes.c_int64(IN_CACHE))

    def plain() -> None:
        for _ in range(IN_ONE):
            loops.adam(*pointers, *bounds)

    found["plain loop / step, one core, from its cache"] = ratio(plain, lambda: cached.step(IN_ONE), 10)
    torch.set_num_threads(threads)
    alone = statistics.median(seconds(memory.step) for _ in range(ROUNDS))
    with two_busy_processes():
        found["step beside two busy processes / alone"] = (
            statistics.median(seconds(memory.step) for _ in range(ROUNDS)) / alone
        )
    for name, value in found.items():
        print(f"{name:46} {value:5.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "threads": threads, **found}, indent=1))


if __name__ == "__main__":
    main()

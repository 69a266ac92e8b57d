"""Time an optimizer's step on the host in every way that the library knows, on an idle machine and on a busy one.

    python benchmarks/host_optimizer.py [--optimizer AdamW] [--elements 1 5 20 50] [--busy 0 2 4 8] [--repeat 9]

`loop` is torch's default step, `pieces` is the same cut into cache-sized pieces, `compiled` is optimizer.cpp, and
`fused` is torch's fused kernel, whose bits are different. All but `fused` must have the loop's bits after every step,
or nothing is printed. `+ wire` is the compiled step that also converts the weights to bfloat16 for their way up, and
`copy` a copy of tensors of so many bytes that it reads and writes as many as that step does. `widen` and `widen, torch`
make FP32 gradients of as many in bfloat16, in compiled code and by torch's operators. `wide` and `narrow` begin with
gradients that came down in bfloat16: `wide` widens all and then steps as `+ wire` does, `narrow` widens each block as
it is stepped. Each repetition times all of them
in turn, small sizes more often; the tables have the medians in milliseconds, and of the ratios within a repetition.
Beside them as many processes as --busy says compute all the time.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch

from sp_lightning.gradients.slab import widened
from sp_lightning.memory.watched_parameters import NarrowGradient
from sp_lightning.memory.weights import Conversion
from sp_lightning.optim import native, pieces

FEWEST = native.FEWEST
STEPS = ("loop", "pieces", "compiled", "fused", "+ wire", "wide", "narrow")
WITH_WIRE = ("+ wire", "wide", "narrow")
OURS = ("pieces", "compiled", *WITH_WIRE)
WAYS = (*STEPS, "copy", "widen", "widen, torch")
RATIOS = {  # a way's speed in that of another one
    "pieces: x loop": ("pieces", "loop"),
    "compiled: x fused": ("compiled", "fused"),
    "+ wire: x copy": ("+ wire", "copy"),
    "widen: x torch": ("widen", "widen, torch"),
    "narrow: x wide": ("narrow", "wide"),
}
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
    for way in STEPS:
        torch.manual_seed(0)
        # A transformer's block has matrices and vectors.
        shapes = [(elements // 8 // 1024, 1024)] * 8 + [(1024,)] * 8
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        made[way] = cls(params, lr=1e-3, **({"momentum": 0.9} if cls is torch.optim.SGD else {}))
        for group in made[way].param_groups:
            group["fused"] = True if way == "fused" else None
    return made


def step_with_wire(shadow, optimizer, wires):
    """Step in compiled code, and convert the weights in the same pass."""
    conversions = {param: Conversion(wire) for param, wire in wires.items()}
    shadow.step_groups(optimizer, optimizer.param_groups, optimizer.state, conversions)


def copy_of(optimizer, wires):
    """Return a copy that reads and writes as many bytes as a step with wire copies."""
    params = optimizer.param_groups[0]["params"]
    state = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    weights = sum(param.nbytes for param in params)
    moved = 3 * weights + 2 * state + sum(wire.nbytes for wire in wires.values())  # gradients are only read
    source, target = (torch.ones(moved // 2, dtype=torch.uint8) for _ in range(2))
    return lambda: target.copy_(source)


def widening(elements):
    """Return a function that lays gradients in bfloat16 into their room, and one for each way to widen them there."""
    room = torch.zeros(elements)
    narrow, grads = room.view(torch.bfloat16)[elements:], torch.randn(elements).bfloat16()

    def compiled():
        assert native.LIBRARY.widen(narrow, room)

    def check():
        assert native.same_bits(room, grads.float())

    return lambda: narrow.copy_(grads), {"widen": compiled, "widen, torch": lambda: widened(narrow, room)}, check


class CameDown:
    """Gradients of an optimizer that come down in bfloat16 (slab.py, Rules 2 and 3)."""

    def __init__(self, optimizer, stay):
        self._params = optimizer.param_groups[0]["params"]
        numels = [param.numel() for param in self._params]
        self._room = torch.zeros(sum(numels))
        self._narrow = self._room.view(torch.bfloat16)[sum(numels) :]
        parts = zip(self._params, self._narrow.split(numels), self._room.split(numels), strict=True)
        self._places = [(narrow.view_as(param), wide.view_as(param)) for param, narrow, wide in parts]
        self._stay = stay

    def lay(self, grads):
        for param, grad, (narrow, wide) in zip(self._params, grads, self._places, strict=True):
            narrow.copy_(grad)
            param.grad = NarrowGradient.of(narrow, torch.float32, lambda: None) if self._stay else wide

    def step(self, step):
        assert self._stay or native.LIBRARY.widen(self._narrow, self._room)
        step()


def measure(cls, elements, repeat):
    """Return the milliseconds of each repetition, by way."""
    made = optimizers(cls, elements)
    shadows = {way: pieces.step_in_pieces(made[way]) for way in OURS}
    came_down = {way: CameDown(made[way], way == "narrow") for way in ("wide", "narrow")}
    native.LIBRARY.steps(made["compiled"], made["compiled"].param_groups[0])
    native.LIBRARY.wait()
    if native.LIBRARY.failure:
        raise SystemExit(f"no compiled code: {native.LIBRARY.failure}")
    lay, runs, check_widened = widening(elements)
    runs |= {way: made[way].step for way in STEPS}
    times = {way: [] for way in WAYS}
    for step in range(repeat + 2):
        grads = [torch.randn_like(param).bfloat16() for param in made["loop"].param_groups[0]["params"]]
        for way, optimizer in made.items():
            if step and way in came_down:
                came_down[way].lay(grads)
                continue
            for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
                param.grad = grad.float()
        if step == 1:  # there is state now
            wires = {}
            for way in WITH_WIRE:
                (group,) = made[way].param_groups
                wires[way] = {param: torch.empty_like(param, dtype=torch.bfloat16) for param in group["params"]}
                runs[way] = functools.partial(step_with_wire, shadows[way], made[way], wires[way])
                if way in came_down:
                    runs[way] = functools.partial(came_down[way].step, runs[way])
            runs["copy"] = copy_of(made["+ wire"], wires["+ wire"])
        for way in WAYS if step % 2 else reversed(WAYS):
            native.FEWEST = FEWEST if way in ("compiled", *WITH_WIRE) else sys.maxsize
            if way in ("widen", "widen, torch"):
                lay()
            start = time.perf_counter()
            runs.get(way, time.perf_counter)()
            times[way].append((time.perf_counter() - start) * 1e3)
            if way in ("widen", "widen, torch"):
                check_widened()
        for way in OURS:
            for ours, loops in zip(
                made[way].param_groups[0]["params"], made["loop"].param_groups[0]["params"], strict=True
            ):
                assert native.same_bits(ours, loops), f"{way} differs from the loop in step {step}"
        for way in WITH_WIRE if step else ():
            assert all(torch.equal(wire, param.bfloat16()) for param, wire in wires[way].items())
    for shadow in shadows.values():
        shadow.close()
    native.FEWEST = FEWEST
    return {way: values[2:] for way, values in times.items()}  # the first make state and touch memory


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", default="AdamW", choices=[cls.__name__ for cls in native.RECIPES])
    parser.add_argument("--elements", type=int, nargs="+", default=[1, 5, 20, 50], help="millions")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--repeat", type=int, default=9, help="of 20 million elements and more; of fewer up to 5 times")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    cls = getattr(torch.optim, options.optimizer)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'busy':>4} {'M':>3}", *(f"{way:>12}" for way in WAYS), *(f"{name:>18}" for name in RATIOS))
    rows = []
    for count in options.busy:
        with busy(count):
            for millions in options.elements:
                repeat = options.repeat * min(5, max(1, 20 // millions))
                times = measure(cls, millions * 1_000_000, repeat)
                medians = {way: statistics.median(values) for way, values in times.items()}
                ratios = {
                    name: statistics.median(b / a for a, b in zip(times[way], times[other], strict=True))
                    for name, (way, other) in RATIOS.items()
                }
                rows.append({"busy": count, "millions": millions, "ms": medians, "ratios": ratios})
                figures = [f"{medians[way]:>12.2f}" for way in WAYS] + [f"{ratio:>18.2f}" for ratio in ratios.values()]
                print(f"{count:>4} {millions:>3}", *figures, flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

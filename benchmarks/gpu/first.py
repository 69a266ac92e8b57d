"""Spend the first ten minutes on a GPU: what all other figures rest on, and what was never explained.

    python benchmarks/gpu/first.py [--only clipped] [--minutes 9]

- Checks: compiled optimizer steps and norms of bfloat16 gradients have the device's bits; host memory is page-locked,
  exact to the page, fast, and given back.
- Llama 3B, 16,384 tokens, clipped: plain and streamed, with a timeline; then with fewer threads, and with threads that
  sleep while they wait; then as four batches of 4,096 tokens that are accumulated.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import campaign
import psutil
import torch
from contenders import OURS
from measured import Comparison, Row, Verdict, begin, others, ours, parser, speed
from torch import Tensor, optim

from sp_lightning.host.device import Device
from sp_lightning.optim import compiled

ELEMENTS = 1 << 20  # of each kind of number
SIZES = (1, 7, 65_535, 65_536, 65_537, 1 << 20, 50_000_003)  # of gradients: norms add chunks of 65,536
ODD = 512  # bytes beyond a power of two, which torch's own allocator would round up to the next
BRANCHES: dict[type[optim.Optimizer], tuple[int, ...]] = {
    optim.AdamW: (compiled.DECOUPLED, compiled.DECOUPLED | compiled.AMSGRAD | compiled.MAXIMIZE),
    optim.Adam: (0, compiled.DECAY),
    optim.SGD: (0, compiled.MOMENTUM, compiled.MOMENTUM | compiled.NESTEROV | compiled.DECAY),
}


# ---- checks, each in a process of its own


def steps_have_the_devices_bits(name: str, small: bool) -> Iterator[Verdict]:
    """Compare compiled steps with the device's; say which number differs first."""
    device = torch.device(name)
    for cls, flags_of_class in BRANCHES.items():
        for is_fused in (False, True):
            asked = f"{cls.__name__}, {'fused' if is_fused else 'foreach'}: the device's bits"
            if device.type == "cpu" or compiled.why_none():
                why = compiled.why_none() or "steps on the CPU are torch's own"
                yield Verdict(asked, f"not known: {why}", None)
                continue
            first = next(
                filter(None, (_difference(cls, flags, is_fused, device, small) for flags in flags_of_class)), ""
            )
            yield Verdict(asked, first or f"equal with {len(flags_of_class)} sets of branches", not first)


def _difference(cls: Any, flags: int, is_fused: bool, device: torch.device, small: bool) -> str:
    pairs: list[tuple[Tensor, Tensor]] = []
    whole = compiled._same_bits

    def seen(mine: Tensor, theirs: Tensor) -> bool:
        pairs.append((mine, theirs))
        return whole(mine, theirs)

    elements = mock.patch.object(compiled, "COMPARED", 1 << 10 if small else ELEMENTS)
    with elements, mock.patch.object(compiled, "_same_bits", seen):
        if compiled._compare(cls, flags, is_fused, device):
            return ""
    mine, theirs = (tensor.detach().flatten() for tensor in pairs[-1])
    differ = ((mine.view(torch.int32) != theirs.view(torch.int32)) & ~(mine.isnan() & theirs.isnan())).nonzero()
    here, there = mine[differ[0]].item(), theirs[differ[0]].item()
    return f"branches {flags}: tensor {len(pairs)}, {len(differ)} of {len(mine)} differ, first {here!r}, not {there!r}"


def norms_have_the_bits_of_wider_gradients(name: str, small: bool) -> Iterator[Verdict]:
    """Compare norms of bfloat16 gradients with those of the same numbers in FP32; odd ones begin within a vector."""
    generator = torch.Generator().manual_seed(0)
    sizes = [size for size in SIZES if size < 1 << 20 or not small]
    narrow = [torch.randn(size + 1, generator=generator).to(name, torch.bfloat16) for size in sizes]
    for shift, what in ((0, "aligned"), (1, "not aligned")):
        grads = [grad[shift : grad.numel() - 1 + shift] for grad in narrow]
        found = torch._foreach_norm(grads, 2, dtype=torch.float32)
        wide = torch._foreach_norm([grad.float() for grad in grads], 2)
        differ = [size for size, one, other in zip(sizes, found, wide, strict=True) if one.item() != other.item()]
        text = f"other bits for {differ} elements" if differ else f"equal for {len(sizes)} sizes"
        yield Verdict(f"norms of bfloat16 gradients, {what}: those of FP32", text, not differ)


def host_memory_is_locked_and_given_back(name: str, small: bool) -> Iterator[Verdict]:
    """Check a slab: its size, its lock until the end, a second lock, a fork, and that memory is given back."""
    nbytes = (16 << 20 if small else 4 << 30) + ODD
    with _opened(name) as device:
        device.slab(1 << 20)  # loads what is needed once
        before, begin = _resident(), time.perf_counter()
        slab = device.slab(nbytes)
        seconds = time.perf_counter() - begin
        slab.fill_(5)
        grown = _resident() - before
        exact = abs(grown - nbytes) < 0.02 * nbytes + (4 << 20)
        text = f"{grown / nbytes:.3f} of it resident, locked at {nbytes / seconds / 1e9:.1f} GB/s"
        yield Verdict("a slab takes its size", text, exact)
        if device._lock is not None:
            with contextlib.suppress(RuntimeError):
                device._lock.lock(slab.data_ptr(), slab.numel())
            right = torch.ones(8, device=name).sum().item() == 8
            yield Verdict("an error of the lock stays where it was made", f"the next kernel is right: {right}", right)
        is_locked, in_fork = device.is_host or slab.is_pinned(), _forked(lambda: 0)
    in_fork += _forked(lambda: int(slab[-1].item() != 5))
    right = is_locked and not slab.is_pinned() and not in_fork
    yield Verdict("a slab is locked until the end", f"{is_locked}, then {slab.is_pinned()}; forks: {in_fork}", right)
    with _opened(name) as device:
        before = _resident()
        for _ in range(20):
            device.slab(nbytes // 8).fill_(1)
        left = _resident() - before
    yield Verdict("slabs are given back", f"{left >> 20} MiB left of 20 x {nbytes // 8 >> 20} MiB", left < nbytes // 8)


def copies_are_right_and_fast(name: str, small: bool) -> Iterator[Verdict]:
    """Check copies through a slab, through torch's own page-locked memory, and through the staging ring."""
    nbytes = (16 << 20 if small else 1 << 30) + ODD
    for kind in ("a slab", "torch's memory", "the staging ring"):
        with _opened(name, "pageable" if kind == "the staging ring" else "auto") as device:
            host = device.passing(nbytes) if kind == "torch's memory" else device.slab(nbytes)
            host.copy_(torch.arange(nbytes, dtype=torch.uint8))
            there = torch.zeros(nbytes, dtype=torch.uint8, device=name)
            up = _rate(device, nbytes, lambda d=device, t=there, h=host: d.send_up(t, h))
            host.fill_(0)
            down = _rate(device, nbytes, lambda d=device, t=there, h=host: d.send_down(h, t))
            right = torch.equal(host, torch.arange(nbytes, dtype=torch.uint8))
        yield Verdict(f"copies through {kind} are right", f"{up:.1f} GB/s up, {down:.1f} down", right)


CHECKS: dict[str, Callable[[str, bool], Iterator[Verdict]]] = {
    check.__name__: check
    for check in (
        steps_have_the_devices_bits,
        norms_have_the_bits_of_wider_gradients,
        host_memory_is_locked_and_given_back,
        copies_are_right_and_fast,
    )
}


@contextlib.contextmanager
def _opened(name: str, host_memory: Any = "auto") -> Iterator[Device]:
    device = Device(name, host_memory)
    try:
        yield device
    finally:
        device.synchronize()
        device.close()


def _resident() -> int:
    nbytes: int = psutil.Process().memory_info().rss
    return nbytes


def _forked(work: Callable[[], int]) -> int:
    child = os.fork()
    if not child:
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _rate(device: Device, nbytes: int, copy: Callable[[], Any]) -> float:
    """Return the GB/s of the best of five copies."""
    seconds = []
    for _ in range(6):
        device.synchronize()
        begin = time.perf_counter()
        arrival = copy()
        arrival.wait(device.current_stream())
        arrival.synchronize()
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return nbytes / min(seconds[1:]) / 1e9


def checked(run: campaign.Campaign) -> None:
    """Run all checks."""
    for name in CHECKS:
        order = {"check": name, "device": run.device, "small": run.small}
        found = run.in_a_process(__file__, "--check", order)
        verdicts = found.get("verdicts") or [vars(Verdict(name, f"ended: {found.get('error')}", False))]
        run.add({"label": name.replace("_", " "), "bars": verdicts, "differences": [], "rows": []})
        run.say(*(f"{Verdict(**verdict)}" for verdict in verdicts))


# ---- steps


def steps(timeline: str) -> list[Comparison]:
    setting = {"model": "llama-3b", "batch": 8, "seq": 2048, "precision": "bf16-mixed", "activations": "recompute"}
    setting |= {"steps": 3, "repetitions": 1}
    few = {"OMP_NUM_THREADS": f"{max(1, (os.cpu_count() or 1) - 2)}"}
    sleeping = {"OMP_WAIT_POLICY": "PASSIVE"}
    by_threads = [Row(OURS, {"window": "auto"}, environment=own) for own in (few, sleeping, {**few, **sleeping})]
    both = others("plain") + ours("auto")
    accumulated = {**setting, "batch": 2, "accumulate": 4}
    return [
        Comparison("llama-3b, 16384 tokens, clipped", {**setting, "timeline": timeline}, both, [speed(0.85)]),
        Comparison("llama-3b, 16384 tokens, clipped, by threads", setting, by_threads),
        Comparison("llama-3b, 4 x 4096 tokens, clipped", accumulated, others("plain") + ours("auto"), [speed(0.85)]),
    ]


def main() -> int:
    arguments = parser(__doc__)
    folder = campaign.RESULTS / "first-timeline"
    arguments.add_argument("--timeline", default=str(folder), help="folder of the timeline (default: %(default)s)")
    arguments.add_argument("--check", help="used by the campaign itself")
    options = arguments.parse_args()
    if options.check:
        order = json.loads(options.check)
        verdicts = [vars(verdict) for verdict in CHECKS[order["check"]](order["device"], order["small"])]
        sys.stdout.write(json.dumps({"verdicts": verdicts}) + "\n")
        return 0
    return begin("first", options, steps(options.timeline), checked)


if __name__ == "__main__":
    sys.exit(main())

"""Optimizer steps on the host in compiled code (kernels/optimizer.cpp) that rounds as the device does.

Torch's optimizers round in another way on CUDA than on the CPU. A weight that is stepped here has the bits of a plain
run on the device, because the code was compared with the device itself: once for each optimizer, kind of kernels and
set of branches, with other numbers than the run's, as learning rates and betas may change with every step. Where a bit
differs, or there is no such code, torch's own operators step on the host, and one log line says so.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import increment_version

from ..kernels.build import Unavailable
from ..kernels.loader import Request, Tensors, compiled, load, unforked, variant
from ..stream.host_gradient import GradientBytes
from ..stream.leaf import Weight

log = logging.getLogger(__name__)

GroupOptions: TypeAlias = dict[str, Any]

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of gradients and wire copies, as the code has them
LISTS_ADAM, FUSED_ADAM, SGD = 0, 1, 2  # the loops
MAXIMIZE, DECOUPLED, NESTEROV, MOMENTUM, DECAY, AMSGRAD, FIRST = 1, 2, 4, 8, 16, 32, 64  # their branches
COMPARED = 1 << 14  # elements of each kind that are compared


class Loop(NamedTuple):
    """What the compiled code needs to know to step the weights of one optimizer group."""

    kind: int
    flags: int
    state: tuple[str, ...]  # names of the state tensors that are as large as the weight
    has_count: bool  # whether the state has the number of steps, as `step`
    scalars: Callable[[float], tuple[float, ...]]  # numbers of the step with this number, from 1


# ---- torch's optimizers as loops


def _adam(group: GroupOptions, is_fused: bool) -> Loop:
    """Describe Adam or AdamW with a group's options as a loop of the compiled code."""
    lr, (beta1, beta2), decay, eps = group["lr"], group["betas"], group["weight_decay"], group["eps"]
    decays = (DECOUPLED if group["decoupled_weight_decay"] else DECAY) if decay else 0
    flags = decays | MAXIMIZE * group["maximize"] | AMSGRAD * group["amsgrad"]

    def by_lists(step: float) -> tuple[float, ...]:
        """Return the scalars that torch's foreach kernels use in the step with this number."""
        size, correction = -(lr / (1 - beta1**step)), (1 - beta2**step) ** 0.5
        return decay, 1 - lr * decay, 1 - beta1, beta2, 1 - beta2, correction, eps, size

    def by_fused_kernel(step: float) -> tuple[float, ...]:
        """Return the scalars that torch's fused kernel uses in the step with this number."""
        found = (ctypes.c_float * 2)()
        _code().sp_lightning_cuda_corrections(*map(ctypes.c_float, (lr, beta1, beta2, step)), found)
        return decay, lr, beta1, beta2, eps, *found

    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]
    kind, scalars = (FUSED_ADAM, by_fused_kernel) if is_fused else (LISTS_ADAM, by_lists)
    return Loop(kind, flags, names, True, scalars)


def _sgd(group: GroupOptions, is_fused: bool) -> Loop:
    """Describe SGD with a group's options as a loop of the compiled code."""
    lr, decay, momentum, dampening = group["lr"], group["weight_decay"], group["momentum"], group["dampening"]
    damped = ctypes.c_float(dampening).value if is_fused else dampening
    flags = DECAY * bool(decay) | MAXIMIZE * group["maximize"] | NESTEROV * group["nesterov"]
    flags, names = (flags | MOMENTUM, ("momentum_buffer",)) if momentum else (flags, ())
    return Loop(SGD, flags, names, False, lambda step: (decay, momentum, 1 - damped, -lr))


LOOPS: dict[type[optim.Optimizer], Callable[[GroupOptions, bool], Loop]] = {
    optim.Adam: _adam,
    optim.AdamW: _adam,
    optim.SGD: _sgd,
}
NUMBERS = ("lr", "weight_decay", "eps", "momentum", "dampening")  # options that the loops take as numbers
# Numbers with which loops are compared: those of most runs, and others for which kernels take another branch.
TRIED: dict[type[optim.Optimizer], list[GroupOptions]] = {
    optim.Adam: [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}, {"lr": 0.1, "betas": (0.3, 0.0), "eps": 1e-3}],
    optim.SGD: [{"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, {"lr": 1.0, "momentum": 0.3, "dampening": 0.0}],
}
TRIED[optim.AdamW] = TRIED[optim.Adam]


def loop_for(cls: Any, group: GroupOptions, device: torch.device) -> Loop | None:
    """Return the compiled loop that gives the same bits as the device's kernels; None if torch has to step.

    The first call for a class and its kind of options compares both, and waits for the device. Logs the reason for
    None, unless the device is the CPU.
    """
    if device.type == "cpu":
        return None
    if cls not in LOOPS:
        say_torch_steps(cls.__name__, device.type, "there is none for it")
        return None
    values = [group[name] for name in NUMBERS if name in group] + list(group.get("betas") or ())
    are_numbers = all(isinstance(value, (int, float)) for value in values)
    is_usual = are_numbers and not group.get("differentiable") and not group.get("capturable")
    if not is_usual or not (group["fused"] or group["foreach"]) or writes_gradients(cls, group):
        say_torch_steps(cls.__name__, device.type, "there is none for its options")
        return None
    loop = LOOPS[cls](group, bool(group["fused"]))
    return loop if _is_same(cls, loop.kind, loop.flags, bool(group["fused"]), device) else None


def writes_gradients(cls: Any, group: GroupOptions) -> bool:
    """Whether torch's foreach step, the default on a device, writes to `.grad` for this class and these options."""
    if not group.get("foreach") or group.get("maximize"):
        return False
    return cls is optim.Rprop or (cls is optim.SGD and group["nesterov"] and not group["weight_decay"])


# ---- the code, and its comparison with the device


@functools.cache
def _code() -> Any:
    """Load the compiled code of this processor, building it first if need be; raise Unavailable if there is none."""
    path = compiled()
    with unforked:
        return load(path)


def why_none() -> str:
    """Say why there is no compiled code on this machine; "" if there is. May run a compiler."""
    try:
        _code()
    except Unavailable as error:
        return str(error)
    return ""


def variant_in_use() -> str | None:
    """Name the processor variant of the compiled code that was loaded; None if no step needed any."""
    return variant() if _code.cache_info().currsize else None


@functools.cache
def _is_same(cls: Any, kind: int, flags: int, is_fused: bool, device: torch.device) -> bool:
    """Whether the compiled loop and the device's kernels give equal bits; compare them once, and log if they differ."""
    try:
        _code()
        reason = "" if _compare(cls, flags, is_fused, device) else f"its bits are not those of {device} here"
    except Unavailable as error:
        reason = str(error)
    if reason:
        say_torch_steps(cls.__name__, device.type, reason)
    return not reason


@functools.cache
def say_torch_steps(name: str, device: str, reason: str) -> None:
    """Log once, as a warning, that torch's own operators step on the host, and why."""
    log.warning(
        "superpipeline: %s steps on the host by torch's own operators, which may round in another way than those of %s"
        " and take longer than compiled code: %s",
        name,
        device,
        reason,
    )


def _compare(cls: Any, flags: int, is_fused: bool, device: torch.device) -> bool:
    """Take three steps in compiled code and on the device, for each entry of TRIED; return whether all bits agree."""
    generator = torch.Generator().manual_seed(0)
    for numbers in TRIED[cls]:
        here = list(_samples(generator))
        there = [nn.Parameter(value.to(device)) for value in here]
        theirs = cls(there, fused=is_fused, foreach=not is_fused)
        group = theirs.param_groups[0]
        options = {**numbers, "weight_decay": 0.1 if flags & (DECAY | DECOUPLED) else 0}
        options |= {"maximize": bool(flags & MAXIMIZE), "amsgrad": bool(flags & AMSGRAD)}
        options |= {"nesterov": bool(flags & NESTEROV)} | ({} if flags & MOMENTUM else {"momentum": 0})
        options |= {"decoupled_weight_decay": bool(flags & DECOUPLED)}
        group.update((name, value) for name, value in options.items() if name in group)
        loop, states = LOOPS[cls](group, is_fused), [_new_state(LOOPS[cls](group, is_fused), value) for value in here]
        for count in range(3):
            grads = list(_samples(generator))
            for param, grad in zip(there, grads, strict=True):
                param.grad = grad.to(device)
            cls.step.__wrapped__(theirs)
            first = FIRST if loop.kind == SGD and loop.flags & MOMENTUM and not count else 0
            parts = [
                Stepped(value, grad, 1.0, state, count + 1.0, loop.flags | first)
                for value, grad, state in zip(here, grads, states, strict=True)
            ]
            _run(loop, loop.flags | first, parts)
            for param, part in zip(there, parts, strict=True):
                pairs = [(part.value, param)] + [(part.state[name], theirs.state[param][name]) for name in loop.state]
                if not all(_same_bits(mine, other.detach().cpu()) for mine, other in pairs):
                    return False
    return True


alike: dict[Any, bool] = {}  # results of comparisons by class, options and device


def rounds_alike(cls: Any, group: GroupOptions, device: torch.device) -> bool:
    """Whether an elementwise optimizer of torch gives the same bits on the host as on the device, with these options.

    The first call for a class and its options compares both, and waits for the device.
    """
    options = {name: value for name, value in group.items() if name not in ("params", "lr")}
    key = cls, repr(options), device
    if key not in alike:
        alike[key] = _torch_is_same(cls, options, device)
    return alike[key]


def _torch_is_same(cls: Any, options: GroupOptions, device: torch.device) -> bool:
    """Take some steps by torch's operators on host and device; return whether all bits are equal."""
    stepped = []
    for place in (torch.device("cpu"), device):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(value.to(place)) for value in _samples(generator)]
        optimizer = cls(params)
        optimizer.param_groups[0].update(options)
        for _ in range(3):
            for param, grad in zip(params, _samples(generator), strict=True):
                param.grad = grad.to(place)
            cls.step.__wrapped__(optimizer)
        stepped.append([param.detach().cpu() for param in params])
    return all(map(_same_bits, *stepped))


def _samples(generator: torch.Generator) -> Iterator[Tensor]:
    """Yield random tensors for comparisons: usual numbers, and any bit patterns (denormals, infinities, NaNs)."""
    for count in (COMPARED, 1001):
        usual = torch.randn(count, generator=generator, device="cpu", dtype=torch.float32)
        bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator, device="cpu", dtype=torch.int32)
        yield torch.cat([usual, usual * 1e-20, bits.view(torch.float32)])


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits; any NaN is equal to any other."""
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


# ---- steps


class Stepped(NamedTuple):
    """What the compiled code needs to step one weight."""

    value: Tensor
    grad: Tensor
    factor: float
    state: GroupOptions  # entries that the step updates
    number: float  # of the step, from 1
    flags: int
    weight: Weight | None = None


def step(loops: list[Loop | None], work: list[Any], scale: Tensor | None, state: Any) -> list[Any]:
    """Step the weights that compiled code can step; return the items of ``work`` that torch has to step.

    Args:
        loops: For each optimizer group its compiled loop, or None.
        work: The weights to step (`slices.StepWork`).
        scale: The GradScaler's scale, by which a fused optimizer divides gradients; None without a GradScaler.
        state: The optimizer's state (`state.WaitingState`); updated.
    """
    left: list[Any] = []
    runs: dict[tuple[int, int], list[Stepped]] = {}  # by group and branches
    for item in work:
        loop = loops[item.group]
        part = None if loop is None else _prepared(loop, item, scale, state.peek(item.weight.host) or {})
        if part is None:
            left.append(item)
        else:
            runs.setdefault((item.group, part.flags), []).append(part)
    for (group, flags), parts in runs.items():
        loop = loops[group]
        assert loop is not None
        _run(loop, flags, parts)
        for part in parts:
            assert part.weight is not None
            if loop.has_count:
                part.state["step"].add_(1)
            if part.state:
                state.make(part.weight.host).update(part.state)
    return left


def _prepared(loop: Loop, item: Any, scale: Tensor | None, own: GroupOptions) -> Stepped | None:
    """Gather what the code needs to step a weight; None if it cannot step the weight's type, gradient or state."""
    value = item.weight.value
    if value.dtype is not torch.float32 or getattr(item.weight.host, "plain_class", None) is not nn.Parameter:
        return None
    is_new = not own if loop.has_count else all(own.get(name) is None for name in loop.state)
    names = (*loop.state, "step") if loop.has_count else loop.state
    state: GroupOptions = _new_state(loop, value) if is_new else {name: own.get(name) for name in names}
    if not all(isinstance(entry, Tensor) and entry.device.type == "cpu" for entry in state.values()):
        return None
    if any(state[name].dtype is not torch.float32 or state[name].stride() != value.stride() for name in loop.state):
        return None
    found = _gradient(item.grad, value, scale)
    if found is None:
        return None
    number = ctypes.c_float(state["step"].item() + 1).value if loop.has_count else 1.0
    flags = loop.flags | (FIRST if loop.kind == SGD and loop.state and is_new else 0)
    return Stepped(value, *found, state, number, flags, item.weight)


def _new_state(loop: Loop, value: Tensor) -> GroupOptions:
    """Make a weight's first optimizer state, as torch's optimizers do."""
    made = {name: torch.zeros_like(value) for name in loop.state}
    if not loop.has_count:
        return made
    is_double = torch.get_default_dtype() is torch.float64 and loop.kind != FUSED_ADAM
    count = torch.zeros((), dtype=torch.float64 if is_double else torch.float32, device="cpu")
    return {"step": count, **made}


def _gradient(grad: Any, value: Tensor, scale: Tensor | None) -> tuple[Tensor, float] | None:
    """Return the gradient on the host, with the weight's strides, and its factor; None if the code cannot read it."""
    if not isinstance(grad, GradientBytes):
        if scale is not None or grad.layout is not torch.strided or grad.dtype is not torch.float32:
            return None
        return torch.empty_like(value).copy_(grad), 1.0
    grad.arrived.synchronize()
    if scale is not None:
        return grad.true_on_host().div_(scale), 1.0  # as by the fused kernel, the user's gradient is unscaled, too
    if len(grad.factors) > 1 or grad.raw.dtype not in TYPES:
        return grad.true_on_host(), 1.0
    return grad.raw, float(grad.factors[0]) if grad.factors else 1.0


def _run(loop: Loop, flags: int, parts: list[Stepped]) -> None:
    """Step weights by one loop with one set of branches, in compiled code on torch's threads."""
    tensors = (Tensors * len(parts))()
    scalars = {part.number: loop.scalars(part.number) for part in parts}
    for each, part in zip(tensors, parts, strict=True):
        each.param, each.grad, each.count = part.value.data_ptr(), part.grad.data_ptr(), part.value.numel()
        each.grad_type, each.factor = TYPES[part.grad.dtype], part.factor
        for place, name in enumerate(loop.state):
            each.state[place] = part.state[name].data_ptr()
        for place, number in enumerate(scalars[part.number]):
            each.scalar[place] = number
        if part.weight is not None and part.weight.is_narrow:
            each.wire, each.wire_type = part.weight.wire.data_ptr(), TYPES[part.weight.wire.dtype]
    request = Request(tensors, len(parts), loop.kind, flags, torch.get_num_threads(), 0)
    _code().sp_lightning_step(ctypes.byref(request))
    assert request.done, "this thread does not round to the nearest number"
    increment_version([part.value for part in parts])
    increment_version([part.state[name] for part in parts for name in loop.state])
    for each, part in zip(tensors, parts, strict=True):
        if each.wire_has_nan and part.weight is not None:
            part.weight.wire.copy_(part.value)  # torch's NaN in the narrow type depends on the element's place

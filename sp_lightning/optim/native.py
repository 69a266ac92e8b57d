"""torch's own optimizers on the host in compiled code: the speed of memory, and the bits of torch's default loop.

1. Compiled code steps nothing that was not compared: its roots over every mantissa, conversions over every case of
   rounding, widening over every number, norms over many lengths and sizes, and each optimizer's options, once, against
   torch's loop over random, extreme and special values. One different bit, and torch's operators step, convert, widen
   or compute norms instead.
2. No step waits: a library is found or compiled (loader.py), and options compared, in a thread of their own, while
   torch's operators step.
3. Bits depend on the processor, on torch and on ``ATEN_CPU_CAPABILITY``: which products ATen's kernels fuse, and which
   root MKL takes. Both are found by comparing (Rule 1), not by asking.
4. Small steps are left to torch: with few elements there is nothing to gain.
5. A process may fork at any time, as data loaders do. The child compares anew, with a thread of its own. A fork waits
   while the thread is inside of torch, whose locks nobody would release in the child, or where loader.py says; it does
   not wait for the compiler.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from ..compat.kernels import mkl_root
from ..compat.modules import step_without_hooks
from ..compat.tensors import add_to_all, dispatch_mode_count
from ..kernels.build import Unavailable
from ..kernels.loader import compiled, load, unforked, variant
from ..kernels.request import SCALARS, Request, Tensors
from ..memory.weights import Conversion

log = logging.getLogger(__name__)

Group = dict[str, Any]
State = dict[str, Any]

DIFFERENT = "its bits are different here"
LARGEST = torch.finfo(torch.float32).max
FEWEST = 1 << 18  # elements of a step below which torch's operators are as fast (Rule 4)
PAST_THE_CACHE = 1 << 22  # widened gradients that are written past it: the step that follows finds few of them in it

MAXIMIZE, DECOUPLED, NESTEROV, CENTERED, MOMENTUM, DECAY = (1 << bit for bit in range(6))
ADAM, SGD_, ADAGRAD, RMSPROP = range(4)
WIRES = {torch.bfloat16: 1, torch.float16: 2}
ROUNDED, NEWTON, NEWTON_FUSED, NEWTON_14, MKL = range(5)  # optimizer.cpp, Rule 2


# Parameter, gradient, state and their elements; scalars; the wire copy, its type, whether it has a NaN; the gradient's
# type, and its factor.
PACKED = struct.Struct(f"=5Qq{SCALARS}fQ3if")


class Norm(ctypes.Structure):
    """One gradient in bfloat16, and its norm, as optimizer.cpp has them."""

    _fields_ = [
        ("grad", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("norm", ctypes.c_float),
        ("unused", ctypes.c_int32),
    ]


class Recipe(NamedTuple):
    """How optimizer.cpp steps an optimizer: the loop, the names of its state, and its options as numbers."""

    kind: int
    flags: Callable[[Group], int]
    state: Callable[[Group], tuple[str | None, ...]]
    scalars: Callable[[Group, float], tuple[float, ...]]  # of a group and a parameter's number of steps
    options: tuple[str, ...]  # all that decide bits, but for the learning rate


def _flag(group: Group, **flags: int) -> int:
    return sum(flag for name, flag in flags.items() if group[name])


def _adam_flags(group: Group) -> int:
    decay = 0 if not group["weight_decay"] else DECOUPLED if group["decoupled_weight_decay"] else DECAY
    return _flag(group, maximize=MAXIMIZE) | decay


def _adam_scalars(group: Group, step: float) -> tuple[float, ...]:
    lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    size = lr / (1 - beta1**step)
    correction = (1 - beta2**step) ** 0.5
    return decay, 1 - lr * decay, 1 - beta1, beta2, 1 - beta2, correction, group["eps"], -size


def _adagrad_scalars(group: Group, step: float) -> tuple[float, ...]:
    return group["weight_decay"], group["eps"], -(group["lr"] / (1 + (step - 1) * group["lr_decay"]))


def _sgd_scalars(group: Group, step: float) -> tuple[float, ...]:
    return group["weight_decay"], group["momentum"], 1 - group["dampening"], -group["lr"]


def _rmsprop_scalars(group: Group, step: float) -> tuple[float, ...]:
    alpha = group["alpha"]
    return group["weight_decay"], alpha, 1 - alpha, group["eps"], group["momentum"], -group["lr"]


_ADAM = Recipe(
    ADAM,
    _adam_flags,
    lambda group: ("exp_avg", "exp_avg_sq"),
    _adam_scalars,
    ("betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay"),
)
# Exactly these classes: a subclass may do anything in its step.
RECIPES: dict[type[Optimizer], Recipe] = {
    Adam: _ADAM,
    AdamW: _ADAM,
    SGD: Recipe(
        SGD_,
        lambda group: _flag(group, maximize=MAXIMIZE, nesterov=NESTEROV, weight_decay=DECAY),
        lambda group: ("momentum_buffer",),
        _sgd_scalars,
        ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    ),
    Adagrad: Recipe(
        ADAGRAD,
        lambda group: _flag(group, maximize=MAXIMIZE, weight_decay=DECAY),
        lambda group: ("sum",),
        _adagrad_scalars,
        ("lr_decay", "weight_decay", "eps", "maximize"),
    ),
    RMSprop: Recipe(
        RMSPROP,
        lambda group: _flag(group, maximize=MAXIMIZE, centered=CENTERED, momentum=MOMENTUM, weight_decay=DECAY),
        lambda group: (
            "square_avg",
            "momentum_buffer" if group["momentum"] > 0 else None,
            "grad_avg" if group["centered"] else None,
        ),
        _rmsprop_scalars,
        ("alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    ),
}


class Library:
    """The compiled optimizer.cpp, the options for which it has torch's bits, and a thread that compares them."""

    def __init__(self) -> None:
        self._code: ctypes.CDLL | None = None
        self._loaded_variant: str | None = None
        self._root = ROUNDED
        self._fused = False
        self._mkl: int | None = None
        self._wires: dict[torch.dtype, int] = {}  # the types to which it converts with torch's bits
        self._widened: dict[torch.dtype, int] = {}  # the types that it widens with torch's bits
        self._summed: tuple[int, int] | None = (
            None  # how norms are: lanes, and which products are fused; None: by torch
        )
        self._reasons: dict[Any, str] = {}  # by options: why they are not used, or empty
        self._asked: list[tuple[Any, Callable[[], bool]]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.failure = ""

    @property
    def variant(self) -> str | None:
        """Name the variant that steps, such as "avx512", or None while torch's operators step all options."""
        return self._loaded_variant if "" in self._reasons.values() else None

    def steps(self, optimizer: Optimizer, group: Group) -> bool:
        """Whether code with torch's bits may step this group. If that is not known, begin to find out."""
        return not self.why_not(optimizer, group)

    def why_not(self, optimizer: Optimizer, group: Group) -> str:
        """Say why no such code may step this group; empty if it may. If that is not known, begin to find out."""
        cls = type(optimizer)  # what waits to be compared keeps no tensor of a step
        options = {name: group[name] for name in RECIPES[cls].options}
        key = (cls, *map(repr, options.values()))
        reason = self._reasons.get(key)
        if reason is None and not self.failure:
            with self._lock:
                if key not in self._reasons:
                    self._reasons[key] = "it is not compared yet"
                    self._asked.append((key, lambda: self._equals_the_loop(cls, options)))
                    if self._thread is None:
                        self._thread = threading.Thread(target=self._find_out, name="native optimizer")
                        self._thread.start()
        return self.failure or self._reasons[key] if reason is None else reason

    def wait(self) -> None:
        """Wait until nothing is compiled or compared."""
        while (thread := self._thread) is not None:
            thread.join()

    def run(
        self, kind: int, flags: int, tensors: Any, threads: int, count: Callable[[], object] = lambda: None
    ) -> bool:
        """Step an array of tensors, and count the step; return False, with nothing done, if this thread rounds oddly.

        A signal that comes meanwhile, as Ctrl-C does, raises where the code returns: the step is counted also then.
        """
        assert self._code is not None
        request = Request(tensors, len(tensors), kind, flags, self._root, self._fused, threads, self._mkl)
        try:
            self._code.sp_lightning_step(ctypes.byref(request))
        finally:
            if request.done:
                count()
        return bool(request.done)

    def wire_type(self, wire: Tensor) -> int:
        """Return the type to which a wire copy is converted, as a number; 0 if torch has to."""
        return self._wires.get(wire.dtype, 0)

    def grad_type(self, grad: Tensor) -> int | None:
        """Return the type of a gradient as a number, 0 for FP32; None if it has to be widened before."""
        return 0 if grad.dtype is torch.float32 else self._widened.get(grad.dtype)

    def widen(self, narrow: Tensor, wide: Tensor) -> bool:
        """Widen flat gradients into memory whose second half they lie in, in one parallel region.

        Returns False, with nothing done, if torch has to.
        """
        code, number = self._code, self._widened.get(narrow.dtype)
        if code is None or number is None or dispatch_mode_count():
            return False
        places = ctypes.c_void_p(narrow.data_ptr()), ctypes.c_void_p(wide.data_ptr())
        count = narrow.numel()
        done = code.sp_lightning_widen(
            *places, ctypes.c_int64(count), number, torch.get_num_threads(), count >= PAST_THE_CACHE
        )
        if done:
            torch.autograd.graph.increment_version(wide)
        return bool(done)

    def norms(self, grads: Sequence[Tensor]) -> list[float] | None:
        """Compute the norms of contiguous gradients in bfloat16, summed in FP32; None if torch has to."""
        if self._code is None or self._summed is None or dispatch_mode_count():
            return None
        found = _norms(self._code, grads, *self._summed, torch.get_num_threads())
        return None if any(map(math.isnan, found)) else found  # of several NaNs ATen keeps one

    # ---- in the thread of its own (Rule 2)

    def _find_out(self) -> None:
        torch.set_flush_denormal(False)  # a thread begins with the setting of the one that began it
        while True:
            with self._lock:
                if not self._asked or self.failure:
                    self._reasons.update((key, self.failure) for key, _ in self._asked)
                    self._asked.clear()
                    self._thread = None
                    return
                key, equals = self._asked.pop(0)
            try:
                if self._code is None:
                    name, path = variant(), compiled()
                    with unforked:
                        code = load(path)
                        self._pick_rounding(code)
                        self._wires = {dtype: number for dtype, number in WIRES.items() if _converts(code, dtype)}
                        widened = {dtype: number for dtype, number in WIRES.items() if _widens(code, dtype)}
                        self._summed = _summed(code)
                    self._code, self._widened, self._loaded_variant = code, widened, name
                with unforked:
                    reason = "" if equals() else f"{DIFFERENT} for {key[0].__name__}{key[1:]}"
            except Exception as error:
                self.failure = reason = str(error)
            self._reasons[key] = reason
            if reason:
                log.info(
                    "superpipeline: an optimizer steps by torch's operators, which take 2 to 3 times as long as "
                    "compiled code would: %s",
                    reason,
                )

    def _pick_rounding(self, code: ctypes.CDLL) -> None:
        """Find out which products ATen fuses, and the root that has torch's bits for numbers of every kind."""
        x = torch.full((64,), 1 + 2.0**-12, dtype=torch.float32)
        self._fused = bool((torch.addcmul(-x * x, x, x) != 0).all())
        self._mkl = mkl_root()
        for root in (ROUNDED, NEWTON, NEWTON_FUSED, NEWTON_14, MKL):
            if (root == ROUNDED or self._mkl) and all(self._has_bits(code, root, numbers) for numbers in _numbers()):
                self._root = root
                return
        raise Unavailable("torch's square root is none of those that are known")

    def _has_bits(self, code: ctypes.CDLL, root: int, numbers: Tensor) -> bool:
        found = torch.empty_like(numbers)
        request = Request(None, 0, 0, 0, root, 0, 1, self._mkl)
        code.sp_lightning_root(
            ctypes.byref(request),
            ctypes.c_void_p(numbers.data_ptr()),
            ctypes.c_void_p(found.data_ptr()),
            ctypes.c_int64(numbers.numel()),
        )
        return same_bits(found, numbers.sqrt())

    def _equals_the_loop(self, cls: type[Optimizer], options: dict[str, Any]) -> bool:
        """Compare some steps with those of torch's loop over numbers of every kind.

        They are the first four, but for one that makes state: a branch that comes later, as RAdam's with its sixth
        step, would be used without being compared.
        """
        recipe, generator = RECIPES[cls], torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(numbers) for numbers in _samples(generator)]
        optimizer = cls(params)  # type: ignore[call-arg]
        group = optimizer.param_groups[0]
        group.update(options, lr=0.01)  # schedules change it: it enters one product of each element
        names, compared = [name for name in recipe.state(group) if name], False
        for _ in range(4):
            requests, ours = [], []
            for param, grad in zip(params, _samples(generator), strict=True):
                param.grad = grad
                if state := optimizer.state[param]:  # else torch makes it
                    mine = {name: state[name].clone() for name in names} | {"": param.detach().clone()}
                    partners = [None if name is None else mine[name] for name in recipe.state(group)]
                    step = state["step"].item() + 1 if "step" in state else 0
                    requests.append(packed(mine[""], grad, partners, _padded(recipe.scalars(group, step))))
                    ours.append((mine, {name: state[name] for name in names} | {"": param}))
            step_without_hooks(cls)(optimizer)  # without the hooks of all optimizers
            compared |= bool(requests)
            if requests and not self.run(recipe.kind, recipe.flags(group), _array(requests), threads=1):
                return False
            if not all(same_bits(mine[name], loops[name]) for mine, loops in ours for name in mine):
                return False
        return compared


def packed(
    param: Tensor,
    grad: Tensor,
    state: Sequence[Tensor | None],
    scalars: tuple[float, ...],
    wire: Tensor | None = None,
    wire_type: int = 0,
    factor: float = 1.0,
) -> bytes:
    """Return a ``Tensors`` of a parameter as bytes: addresses, which the caller keeps alive, and numbers."""
    first, second, third = [0 if tensor is None else tensor.data_ptr() for tensor in state] + [0] * (3 - len(state))
    to = 0 if wire is None else wire.data_ptr()
    places = param.data_ptr(), grad.data_ptr(), first, second, third
    grad_type = LIBRARY.grad_type(grad) or 0
    return PACKED.pack(*places, param.numel(), *scalars, to, wire_type, 0, grad_type, factor)


def _converted(conversion: Conversion | None) -> tuple[Tensor | None, int]:
    return (None, 0) if conversion is None else (conversion.wire, LIBRARY.wire_type(conversion.wire))


def _padded(scalars: tuple[float, ...]) -> tuple[float, ...]:
    return scalars + (0.0,) * (SCALARS - len(scalars))


def _array(tensors: Sequence[bytes]) -> Any:
    return (Tensors * len(tensors)).from_buffer(bytearray(b"".join(tensors)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of 32-bit numbers have the same bits, also of NaNs."""
    return torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))


def _numbers() -> Iterator[Tensor]:
    """Yield every mantissa with both parities of the exponent, then numbers of every kind."""
    first, last, chunk = 0x3F800000, 0x40800000, 1 << 16  # 1.0, 4.0; few at a time, since the heap keeps their memory
    for start in range(first, last, chunk):
        yield torch.arange(start, start + chunk, dtype=torch.int32).view(torch.float32)
    generator = torch.Generator().manual_seed(1)
    yield torch.randint(-(1 << 31), 1 << 31, (chunk,), dtype=torch.int32, generator=generator).view(torch.float32)
    yield _mixture(generator)


def _converts(code: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether compiled code converts every number but NaN to this type as torch does."""
    # The upper bits say between which numbers of that type it lies, and the others whether in the middle.
    kept = 16 if dtype is torch.bfloat16 else 19
    half, first = 1 << (31 - kept), -(1 << (kept - 1))
    chunk = 1 << 13  # few at a time, since the heap keeps their memory
    lowers = (0, 1, half - 1, half, half + 1, 2 * half - 1)
    for start, lower in itertools.product(range(first, -first, chunk), lowers):
        numbers = ((torch.arange(start, start + chunk, dtype=torch.int32) << (32 - kept)) + lower).view(torch.float32)
        numbers = numbers[~numbers.isnan()]
        found, expected = torch.empty_like(numbers, dtype=dtype), numbers.to(dtype)
        address = ctypes.c_void_p(numbers.data_ptr()), ctypes.c_void_p(found.data_ptr())
        if not code.sp_lightning_convert(*address, ctypes.c_int64(numbers.numel()), WIRES[dtype]):
            return False
        if not torch.equal(found.view(torch.int16), expected.view(torch.int16)):
            return False
    return True


def _widens(code: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether compiled code widens all numbers of this type, but for NaNs in FP16, as torch does wherever they lie."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short().view(dtype)
    if dtype is torch.float16:
        numbers = numbers[~numbers.isnan()]
    at_ends = torch.cat([few.float() for few in numbers.split(31)])  # type: ignore[no-untyped-call]
    for past_the_cache in (False, True):
        found = torch.empty(len(numbers), dtype=torch.float32)
        narrow = found.view(dtype)[len(numbers) :].copy_(numbers)
        address = ctypes.c_void_p(narrow.data_ptr()), ctypes.c_void_p(found.data_ptr())
        if not code.sp_lightning_widen(*address, ctypes.c_int64(len(numbers)), WIRES[dtype], 1, past_the_cache):
            return False
        if not (same_bits(found, numbers.float()) and same_bits(found, at_ends)):
            return False
    return True


def _norms(code: ctypes.CDLL, grads: Sequence[Tensor], lanes: int, fused: int, threads: int) -> list[float]:
    """Compute norms, the largest gradient first; return NaNs if this thread rounds in a way of its own."""
    order = sorted(range(len(grads)), key=lambda place: -grads[place].numel())
    norms = (Norm * len(grads))(*[Norm(grads[place].data_ptr(), grads[place].numel(), math.nan, 0) for place in order])
    code.sp_lightning_norms(norms, ctypes.c_int64(len(grads)), lanes, fused, min(threads, len(grads)))
    return [norm for _, norm in sorted((place, one.norm) for place, one in zip(order, norms, strict=True))]


def _summed(code: ctypes.CDLL) -> tuple[int, int] | None:
    """Find out how ATen sums squares for a norm; return None if it is in no known way."""
    generator = torch.Generator().manual_seed(2)
    grads = []
    for numel in (*range(1, 70), 1000, 1003, 65537):
        for exponent in (0, -10, -19, -20, -20.5, -21, 18):  # some, with squares that are next to zero or to infinity
            grads.append((torch.randn(numel, generator=generator) * 10.0**exponent).bfloat16())
    expected = [torch.linalg.vector_norm(grad.float()).item() for grad in grads]
    ways = itertools.product((4, 8, 16), range(8))
    return next((way for way in ways if _norms(code, grads, *way, 1) == expected), None)


def _samples(generator: torch.Generator) -> Iterator[Tensor]:
    """Yield many numbers of every kind, and a few at a time: ATen's kernels treat the last ones in another way."""
    yield _mixture(generator)
    special = _special(64 * 31, generator)
    special[::3] = torch.randn(len(special[::3]), dtype=torch.float32, generator=generator)
    yield from special.split(31)  # type: ignore[no-untyped-call]


def _mixture(generator: torch.Generator) -> Tensor:
    """Make numbers of usual and extreme size, of any bits, and special ones."""
    n = 5000
    usual = torch.randn(n, dtype=torch.float32, generator=generator)
    extreme = usual * 10.0 ** torch.randint(-38, 38, (n,), generator=generator)
    any_bits = torch.randint(-(1 << 31), 1 << 31, (n,), dtype=torch.int32, generator=generator).view(torch.float32)
    mixed = torch.cat([usual, extreme.float(), any_bits, _special(1001, generator)])
    return mixed[torch.randperm(mixed.numel(), generator=generator)]


def _special(n: int, generator: torch.Generator) -> Tensor:
    inf, nan, tiny = float("inf"), float("nan"), torch.finfo(torch.float32).tiny
    positive = torch.tensor([0.0, inf, nan, tiny, tiny / 8, 1.0, 3.4e38], dtype=torch.float32)
    both = torch.cat([positive, -positive])
    return both[torch.randint(len(both), (n,), generator=generator)]


LIBRARY = Library()


def _begin_anew() -> None:
    global LIBRARY
    LIBRARY = Library()
    unforked.release()


os.register_at_fork(before=unforked.acquire, after_in_parent=unforked.release, after_in_child=_begin_anew)


class Candidate(NamedTuple):
    """A parameter with its gradient, its state and its wire copy, which have the same order in flat memory.

    The gradient may be in the type in which it came down, and is multiplied by the factor once it is widened.
    """

    param: Tensor
    grad: Tensor
    state: State
    conversion: Conversion | None = None
    factor: float = 1.0


def reads(param: Tensor, *others: Tensor) -> bool:
    """Whether compiled code sees what torch's operators would: FP32 tensors whose bytes are their numbers."""
    for other in others:
        if type(other) is not Tensor or other.dtype is not torch.float32 or other.is_neg():
            return False
    return not param.is_neg()


def step(optimizer: Optimizer, group: Group, candidates: Sequence[Candidate]) -> bool:
    """Step parameters of a group, or return False if torch's operators have to step them."""
    recipe = RECIPES[type(optimizer)]
    if sum(candidate.param.numel() for candidate in candidates) < FEWEST:
        return False
    if not _has_plain_options(group, recipe) or dispatch_mode_count():
        return False
    if group.get("amsgrad"):  # the bits of a NaN in ATen's maximum depend on where in a thread's share it lies
        return False
    if not LIBRARY.steps(optimizer, group) or any(LIBRARY.grad_type(one.grad) is None for one in candidates):
        return False
    names = recipe.state(group)
    needed = {name for name in names if name is not None}
    if not all(needed <= candidate.state.keys() for candidate in candidates):
        return False
    counts = [candidate.state["step"] for candidate in candidates if "step" in candidate.state]
    if len(counts) not in (0, len(candidates)):
        return False
    done = [count.item() for count in counts] or [0.0] * len(candidates)
    scalars: dict[float, tuple[float, ...]] = {}
    for count in set(done):
        numbers = recipe.scalars(group, ctypes.c_float(count + 1).value)  # FP32, as they are
        if not all(abs(number) <= LARGEST for number in numbers):
            return False  # torch refuses one that is too large; of two NaNs its operators keep the one or the other
        scalars[count] = _padded(numbers)
    partners = [[None if name is None else candidate.state[name] for name in names] for candidate in candidates]
    tensors = _array(
        [
            packed(param, grad, partner, scalars[count], *_converted(conversion), factor)
            for (param, grad, _, conversion, factor), partner, count in zip(candidates, partners, done, strict=True)
        ]
    )

    def count_it() -> None:
        if counts:
            add_to_all(counts, 1)
        written = [candidate.param for candidate in candidates]
        written += [tensor for partner in partners for tensor in partner if tensor is not None]
        torch.autograd.graph.increment_version(written)

    if not LIBRARY.run(recipe.kind, recipe.flags(group), tensors, torch.get_num_threads(), count_it):
        return False
    for place, (param, _, _, conversion, _) in enumerate(candidates):
        if conversion is not None and tensors[place].wire_type and not tensors[place].wire_has_nan:
            conversion.done(param)
    return True


def _has_plain_options(group: Group, recipe: Recipe) -> bool:
    """Whether all options that decide bits are numbers; an option may be a tensor."""
    if not all(name in group for name in ("lr", *recipe.options)):
        return False
    values = [group["lr"], *(group[name] for name in recipe.options if name != "betas"), *group.get("betas", ())]
    return all(isinstance(value, (bool, int, float)) for value in values)

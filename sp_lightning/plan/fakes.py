"""Run model code on tensors without data, with the kernels and the casts of the device that is planned for.

Tensors are fake ones of torch's (FakeTensorMode), on the CPU. What a few numbers decide (token ids, masks, grid sizes)
is also computed, on values that are known: so ``.item()``, ``nonzero()`` and a mask as an index have an answer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..compat.patches import RUN_BACKWARD
from ..compat.tensors import (
    FLATTEN,
    TorchDispatchMode,
    fake_mode,
    fake_tensor,
    is_fake,
    needs_values,
    schema_of,
    storage_id,
    without_dispatch_modes,
    without_function_modes,
    written_by,
)

aten = torch.ops.aten
HALVES = torch.float16, torch.bfloat16
FUSED = "cuda", "xpu"  # device types with fused attention for training
KNOWN_INTEGERS = 2**21  # elements of the largest integer tensor whose values are known
KNOWN_FLOATS = 64
KNOWN_MASKS = 2**18  # the same for floats of a batch
UNKNOWN = needs_values()
Observer = Callable[[Any, Any, Any, Any], None]


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Run on plain tensors in this context, whatever modes are in force."""
    with without_function_modes(), without_dispatch_modes():
        yield


class FakeTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which model code runs without data; ``observe`` is called with each operator and its result.

    Args:
        target: The device type whose kernels are counted, such as "cuda".
        autocast: The type that the precision casts to; None for no autocast.
        real: Tensors have data after all, for a model that depends on values that it computes.
    """

    def __init__(self, target: str, autocast: torch.dtype | None, real: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observe: Observer | None = None
        self.building = False  # a module is being made: its initial weights do not matter
        self._fake = None if real else fake_mode()
        self._kernels = _Kernels(target, self)
        self._autocast = autocast
        self._known: dict[int, torch.UntypedStorage] = {}  # values, by storage, as long as that exists
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> FakeTensors:
        enter = self._contexts.enter_context
        enter(torch.random.fork_rng(devices=[]))
        enter(torch.autocast("cpu", dtype=self._autocast, enabled=self._autocast is not None, cache_enabled=False))
        if self._fake is not None:
            enter(self._fake)
            enter(self._kernels)
            enter(_in_backward_too(self._kernels))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._contexts.close()

    def adopt(self, tensor: Tensor) -> Tensor:
        """Return a tensor like this one without data; values of small ones stay known."""
        if self._fake is None:
            return tensor.detach().clone()
        if is_fake(tensor):
            return tensor
        with outside():
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = fake_tensor(self._fake, made)
        if not tensor.is_meta:
            self._learn(fake, tensor.detach(), KNOWN_MASKS)
        return fake

    def values(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor with its values; None if they are unknown. Call outside of the fake mode."""
        if not is_fake(tensor):
            return tensor
        storage = self._known.get(storage_id(tensor.untyped_storage()))
        if storage is None:
            return None if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _learn(self, fake: Tensor, values: Tensor, floats: int = KNOWN_FLOATS) -> None:
        """Note the values of a tensor that is small and has its storage to itself."""
        inexact = fake.dtype.is_floating_point or fake.dtype.is_complex
        if not 0 < fake.numel() <= (floats if inexact else KNOWN_INTEGERS):
            return
        storage = fake.untyped_storage()
        key = storage_id(storage)
        with outside():
            if key not in self._known:
                weakref.finalize(storage, self._known.pop, key, None).atexit = False
            self._known[key] = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            mine = self.values(fake)
            assert mine is not None
            for dim, (step, size) in enumerate(zip(fake.stride(), fake.shape, strict=True)):
                if step == 0 and size:  # one element for all of them
                    mine, values = mine.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            mine.copy_(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, FLATTEN) for kind in types):
            return NotImplemented  # the operators of its class's code are seen
        kwargs = kwargs or {}
        out = func(*args, **kwargs) if self._fake is None else self._run(func, args, kwargs)
        if self.observe is not None:
            self.observe(func, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_of(args, kwargs)
        if not all(is_fake(tensor) for tensor in tensors):
            args, kwargs = mapped(Tensor, self.adopt, args), mapped(Tensor, self.adopt, kwargs)
            tensors = tensors_of(args, kwargs)
            if func is aten.lift_fresh.default:
                return args[0]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            args = (args[0], self._as_integers(args[1]), *args[2:])
        knows = all(storage_id(tensor.untyped_storage()) in self._known or not tensor.numel() for tensor in tensors)
        try:
            out = func(*args, **kwargs)
        except UNKNOWN:
            return self._decided(func, args, kwargs, knows)
        if schema_of(func).is_mutable:
            self._write(func, args, kwargs, knows)
        elif knows:
            self._repeat(func, args, kwargs, tensors, out)
        return out

    def _decided(self, func: Any, args: Any, kwargs: Any, knows: bool) -> Any:
        """Return a result that depends on values: a number, or tensors whose shapes do."""
        if knows:
            with outside():
                found = func(*mapped(Tensor, self.values, args), **mapped(Tensor, self.values, kwargs))
            return mapped(Tensor, self.adopt, found)
        if self.building and func is aten._local_scalar_dense.default:
            return 0
        with outside():
            mask = self.values(args[1]) if func is aten.masked_select.default else None
        if mask is None:
            raise
        return args[0].new_empty(int(mask.expand(args[0].shape).sum()))

    def _write(self, func: Any, args: Any, kwargs: Any, knows: bool) -> None:
        if knows:
            with outside():
                func(*mapped(Tensor, self.values, args), **mapped(Tensor, self.values, kwargs))
            return
        for tensor in tensors_of(written_by(func, args, kwargs)):
            self._known.pop(storage_id(tensor.untyped_storage()), None)

    def _repeat(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> None:
        """Run an operator on values, for results that are small and new."""
        had = {storage_id(tensor.untyped_storage()) for tensor in tensors}
        made = [tensor for tensor in tensors_of((out,)) if storage_id(tensor.untyped_storage()) not in had]
        if not made or all(tensor.dtype.is_floating_point and tensor.numel() > KNOWN_FLOATS for tensor in made):
            return
        if any(tensor.numel() > KNOWN_INTEGERS for tensor in made):
            return
        with outside():
            values = func(*mapped(Tensor, self.values, args), **mapped(Tensor, self.values, kwargs))
        for tensor, value in zip(tensors_of((out,)), tensors_of((values,)), strict=True):
            if storage_id(tensor.untyped_storage()) not in had:
                self._learn(tensor, value)

    def _as_integers(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Turn masks among indices into positions: how many are set decides the shape."""
        found: list[Tensor | None] = []
        for index in indices:
            with outside():
                masks = index is not None and index.dtype in (torch.bool, torch.uint8)
                values = self.values(index) if masks and index is not None else None
                places = None if values is None else values.nonzero(as_tuple=True)
            found += [index] if places is None else map(self.adopt, places)
        return found


def mapped(kind: type, function: Callable[[Any], Any], arguments: Any) -> Any:
    """Apply a function to all of a kind among an operator's arguments, which are plain containers."""
    if isinstance(arguments, kind):
        return function(arguments)
    if isinstance(arguments, dict):
        return {name: mapped(kind, function, value) for name, value in arguments.items()}
    if isinstance(arguments, list | tuple):
        values = [mapped(kind, function, value) for value in arguments]
        return values if isinstance(arguments, list) else tuple(values)
    return arguments


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[Tensor]:
    """List the tensors among an operator's arguments or results, single or in lists."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


# ---- kernels and casts of the target

# Functions that CUDA's autocast computes in FP32, and those whose result alone is FP32; the CPU's does not.
IN_FP32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm group_norm "
    "cosine_similarity nll_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits "
    "dist cdist renorm logsumexp norm rms_norm interpolate".split()
)
TO_FP32 = frozenset("prod softmax log_softmax cumprod cumsum sum".split())
READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
MOVES = {Tensor.cuda, Tensor.cpu}


class _Kernels(TorchFunctionMode):
    """A mode in which functions run as on the target device, and every tensor stays where it is."""

    def __init__(self, target: str, tensors: FakeTensors) -> None:
        super().__init__()
        self._target = target
        self._tensors = tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MOVES:
            return args[0]
        if func in READS:
            with outside():
                values = self._tensors.values(args[0])
            if values is None:
                raise UNKNOWN[0](func)
            return func(values, *args[1:], **kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is Tensor.to:
            args = (args[0], *(torch.device("cpu") if _is_device(value) else value for value in args[1:]))
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.dropout and self._target in FUSED:
            return self._dropout(*args, **kwargs)
        if self._target != "cpu" and torch.is_autocast_enabled("cpu"):
            return self._cast(func, args, kwargs)
        return func(*args, **kwargs)

    def _cast(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        first = args[0] if args else kwargs.get("input")
        if not isinstance(first, Tensor) or first.dtype not in HALVES:
            return func(*args, **kwargs)
        if name in TO_FP32 and kwargs.get("dtype") is None:
            return func(*args, **{**kwargs, "dtype": torch.float32})
        if name == "cross_entropy" and not kwargs.get("label_smoothing") and not args[1].is_floating_point():
            # Its log_softmax is given the logits' own type, which autocast then leaves; the loss itself casts to FP32.
            likely = _widened(torch.log_softmax(first, 1 if first.dim() > 1 else 0))
            kept = {key: value for key, value in kwargs.items() if key in ("weight", "ignore_index", "reduction")}
            return F.nll_loss(likely, *args[1:], **kept)
        if name in IN_FP32 or name == "cross_entropy":
            return func(*mapped(Tensor, _widened, args), **mapped(Tensor, _widened, kwargs))
        return func(*args, **kwargs)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:  # as torch names it
        if training and 0 < p < 1 and input.numel():
            return torch.native_dropout(input, p, training)[0]  # it saves a mask of one byte per element
        return F.dropout(input, p, training, inplace)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Run attention by the kernel that the target picks."""
        if torch.is_autocast_enabled("cpu"):
            lower = torch.get_autocast_dtype("cpu")
            query, key, value = (each.to(lower) for each in (query, key, value))
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
        elif mask is not None:
            mask = mask.to(query.dtype)
        kernel = self._kernel(query, key, value, mask, dropout_p, enable_gqa)
        if kernel == "math":
            return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
                query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        if kernel == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
                query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
            )[0]
        if kernel == "flash":
            width = query.shape[-1]
            padded = [F.pad(each, (0, -width % 8)) if width % 8 else each for each in (query, key, value)]
            out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :width]  # type: ignore[no-any-return]
        needs = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        if mask is not None:
            mask = mask.expand(*query.shape[:3], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, mask, needs, dropout_p, is_causal, scale=scale
        )[0]

    def _kernel(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, grouped: bool
    ) -> str:
        """Return "flash", "efficient", "cpu" (flash on the CPU) or "math"."""
        alike = query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
        grouped = grouped and query.shape[1] != key.shape[1]
        if not alike:
            return "math"
        if self._target == "cpu":
            return "math" if dropout or grouped or (mask is not None and mask.requires_grad) else "cpu"
        if self._target not in FUSED or query.dtype is torch.float64:
            return "math"
        if query.dtype in HALVES and mask is None and query.shape[-1] <= 256:
            return "flash"
        return "math" if grouped else "efficient"


@contextlib.contextmanager
def _in_backward_too(mode: TorchFunctionMode) -> Iterator[None]:
    """Keep the mode on in code that backward runs, such as a checkpoint: torch switches it off during that call."""

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return RUN_BACKWARD.original(*args, **kwargs)

    RUN_BACKWARD.install(run_in_mode)
    try:
        yield
    finally:
        RUN_BACKWARD.remove()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _is_device(value: object) -> bool:
    return isinstance(value, str | torch.device | int) and not isinstance(value, bool)


@contextlib.contextmanager
def building(tensors: FakeTensors) -> Iterator[None]:
    """Make a module in this context: numbers that its initialisation asks for are zero where they are unknown."""
    tensors.building = True
    try:
        yield
    finally:
        tensors.building = False

"""Run model code on tensors without data, with the kernels and the casts of a CUDA device.

Tensors are torch's fake ones (FakeTensorMode), on the CPU, where autograd runs without a device. Small integer tensors
are real, and so is what is computed of them alone: token ids, masks and grid sizes have values, so ``.item()``,
``nonzero()`` and a mask as an index have an answer. A number read from other floats, such as a logged loss, is 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..compat.tensors import FLATTEN
from ..compat.torch import (
    TorchDispatchMode,
    fake_mode,
    fake_tensor,
    is_fake,
    needs_values,
    schema_of,
    tree_map_only,
    without_dispatch_modes,
    without_function_modes,
)

aten = torch.ops.aten
HALVES = torch.float16, torch.bfloat16
KNOWN = 2**21  # elements of the largest integer tensor that has values
UNKNOWN = needs_values()
CPU = torch.device("cpu")


class FakeTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which model code runs without data.

    Args:
        autocast: The type that the precision casts to; None for no autocast.
    """

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observe: Any = None
        self._fake = fake_mode()
        self.kernels, self._autocast = _Kernels(), autocast

    @contextlib.contextmanager
    def running(self, observe: Callable[..., None] = lambda *_: None) -> Iterator[None]:
        """Run model code without data in this context, with the run's autocast, and restore random state after.

        ``observe`` is called with each operator, its arguments and its result.
        """
        self._observe = observe
        autocast = torch.autocast("cpu", self._autocast, self._autocast is not None, cache_enabled=False)
        with torch.random.fork_rng(devices=[]), autocast, self.kernels, self:
            yield

    def adopt(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor like this one, of type ``dtype`` if given: fake, or a copy if it is small and of integers."""
        if getattr(tensor, "fake_mode", None) is self._fake and dtype in (None, tensor.dtype):
            return tensor
        if not is_fake(tensor) and not tensor.is_meta and _is_known(tensor):
            return tensor.detach().to(dtype or tensor.dtype, copy=True)
        with without_function_modes(), without_dispatch_modes():
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
            return fake_tensor(self._fake, made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, FLATTEN) for kind in types):
            return NotImplemented  # the class's own code is traced, operator by operator
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": CPU}  # code may name another, such as meta, on which the module was made
        out = self._run(func, args, kwargs)
        self._observe(func, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator: without data if an argument is fake or the result is large, else with values."""
        tensors, writes = tensors_of((*args, *kwargs.values())), schema_of(func).is_mutable
        if any(map(is_fake, tensors)):
            if func is aten._local_scalar_dense.default and tensors[0].is_floating_point():
                return 1.0
            if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
                args = (args[0], _as_integers(args[1]), *args[2:])
            if writes and not is_fake(tensors[0]):
                raise UNKNOWN[0](func)  # a fake tensor's value would be written into a real one
            if func is aten._grouped_mm.default and tensors[0].dtype is torch.float32:  # its fake kernel refuses FP32
                return func(*(one.bfloat16() for one in args[:2]), *args[2:], **kwargs).float()
            return func(*args, **kwargs)
        if not (tensors and writes):
            with contextlib.suppress(*UNKNOWN), self._fake:
                out = func(*args, **kwargs)
                is_made = not tensors or func is aten.lift_fresh.default  # made, not computed from the batch
                if not all(_is_known(one, not is_made) for one in tensors_of((out,))):
                    return out
        return func(*args, **kwargs)


def _is_known(tensor: Tensor, is_computed: bool = False) -> bool:
    """Whether a real tensor keeps its values here: if it is small and, unless computed from such, of integers."""
    return tensor.numel() <= KNOWN and (is_computed or not (tensor.is_floating_point() or tensor.is_complex()))


def _as_integers(indices: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Replace masks among indices by the positions that they select, whose number decides the result's shape."""
    found: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8) and not is_fake(index)
        found += index.nonzero(as_tuple=True) if is_mask and index is not None else [index]
    return found


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """List the tensors among an operator's arguments or results, single or in lists."""
    lists = (value if isinstance(value, (list, tuple)) else (value,) for value in values)
    return [one for some in lists for one in some if isinstance(one, Tensor)]


# ---- kernels and casts of CUDA

# Functions that CUDA's autocast computes in FP32, and those whose result alone is FP32; the CPU's does not.
IN_FP32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm group_norm "
    "cosine_similarity nll_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits "
    "dist cdist renorm logsumexp norm rms_norm interpolate cross_entropy".split()
)
TO_FP32 = frozenset("prod softmax log_softmax cumprod cumsum sum".split())


class _Kernels(TorchFunctionMode):
    """A mode in which functions run as on a CUDA device, and every tensor stays where it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return _cast(func, args, kwargs) if torch.is_autocast_enabled("cpu") else func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run attention by the kernel that CUDA would pick: flash, memory-efficient or plain math."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    mask, grouped = attn_mask, enable_gqa and query.shape[1] != key.shape[1]
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype)
        mask = bias.masked_fill(mask, 0) if mask.dtype is torch.bool else mask.to(query.dtype)
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    fused = query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if fused and query.dtype in HALVES and mask is None and query.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if not fused or grouped or query.dtype is torch.float64:
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function in the types to which CUDA's autocast casts its arguments and result."""
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
    if name in IN_FP32:
        args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
    return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run dropout as CUDA's fused kernel does, which saves a mask of one byte an element."""
    return torch.native_dropout(input, p, training)[0] if training and 0 < p < 1 else input


def _widened(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in FP32, and any other as it is."""
    return tensor.float() if tensor.dtype in HALVES else tensor

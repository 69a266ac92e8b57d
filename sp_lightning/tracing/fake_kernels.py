"""Kernels and casts of a target device, for tensors without data.

1. Autocast, and torch's own choice of kernels, depend on the tensors' device, which meta tensors lack. So an unused
   dispatch key above autograd is switched on for the calling thread: under it, operators are cast as CUDA's autocast
   casts them, and attention and dropout become the kernels that the target would run.
2. The CPU's autocast flag decides whether to cast: model code sees the CPU, and switches that flag off and on.
3. torch's loss in chunks chooses types and buffers in Python, by the device: it is told the target's. Of a CUDA device
   that is absent it is assumed that it multiplies half precision into FP32, as all since 2020 do.
4. A target device at hand shows which attention kernel it picks by running a tiny one; for others the choice is listed.
   Such a device is initialized before model code runs: torch refuses a checkpoint in which one is initialized.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..compat.kernels import has_chunked_loss
from ..compat.patches import chunked_loss
from ..compat.tensors import (
    dispatch_key,
    is_key_excluded,
    key_excluded,
    key_included,
    key_set,
    operators_with_key,
    schema_of,
    set_key_excluded,
    with_dispatch,
    without_dispatch_modes,
    without_function_modes,
)

log = logging.getLogger(__name__)

aten = torch.ops.aten
META = torch.device("meta")
KEY = "AutocastIPU"  # Rule 1
FUSED = ("cuda", "xpu")  # device types with fused attention for training


class _Target:
    """The device whose kernels are counted, for the one thread that plans."""

    target = "cuda"
    device: torch.device | None = None  # one of that type, if at hand


_target = _Target()


@contextlib.contextmanager
def kernels_of(target: str, autocast: torch.dtype | None) -> Iterator[None]:
    """Run operators on meta tensors as that device type would, within this context."""
    _register()
    before = _target.target, _target.device
    _target.target, _target.device = target, _at_hand(target)
    try:
        with _key_is_on(), _autocast_flag(autocast), _chunks_of_target():
            yield
    finally:
        _target.target, _target.device = before


def _at_hand(target: str) -> torch.device | None:
    """Return the initialized device of that type; None if there is none (Rule 4)."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != target:
        return None
    try:
        torch.accelerator.current_device_index()
    except RuntimeError as error:  # other processes use all of it, or this one was forked after it was in use
        log.debug("superpipeline: cannot find out which attention kernel device %r picks: %s", target, error)
        return None
    return device


@contextlib.contextmanager
def _key_is_on() -> Iterator[None]:
    key = dispatch_key(KEY)
    before = is_key_excluded(key)
    set_key_excluded(key, False)
    try:
        with key_included(key):
            yield
    finally:
        set_key_excluded(key, before)


@contextlib.contextmanager
def _autocast_flag(dtype: torch.dtype | None) -> Iterator[None]:
    """Set the CPU's autocast flag and type within this context (Rule 2)."""
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])


# The loss in chunks (Rule 3)

_GET_DEVICE: Any = Tensor.device.__get__
HALVES = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def _chunks_of_target() -> Iterator[None]:
    if not has_chunked_loss:
        yield
        return
    chunked_loss().install(_loop_over_chunks)
    try:
        yield
    finally:
        chunked_loss().remove()


def _loop_over_chunks(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    with without_function_modes():
        is_fake = tensor.is_meta
    with contextlib.ExitStack() as stack:
        if is_fake:  # else another thread trains
            stack.enter_context(with_dispatch())
            stack.enter_context(_OnTarget())
        return chunked_loss().original(tensor, *args, **kwargs)


class _OnTarget(TorchFunctionMode):
    """A mode in which tensors appear to be on the target device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_DEVICE:
            return torch.device(_target.target)
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        return func(*args, **(kwargs or {}))


def options_on_target(options: Any, dtype: torch.dtype) -> Any:
    """Return the options of a loss in chunks with what "auto" is for inputs of this type on the target device."""
    if options.acc_policy != "auto":
        return options
    emulated = _target.target == "cpu" and dtype in HALVES
    widened = torch.float32 if _target.target in ("cpu", "cuda") and dtype in HALVES else None
    policy = "accurate" if emulated else "compact"
    return dataclasses.replace(options, acc_policy=policy, acc_dtype=options.acc_dtype or widened)


# CUDA's autocast: operators that run in the lower precision, in FP32, in the widest of their arguments' types, and
# with dtype=float32. Names that the installed torch does not cast are skipped.
LOWER = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc
conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul mm mv
linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_thnn_fused_lstm_cell _thnn_fused_gru_cell einsum
""".split()
FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss
nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
pdist cdist renorm logsumexp frobenius_norm.dim nuclear_norm nuclear_norm.dim linalg_matrix_norm
linalg_matrix_norm.str_ord norm.Scalar norm.ScalarOpt_dim rms_norm
_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d
""".split()
PROMOTED = """
addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
""".split()
FP32_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList linalg_vector_norm
""".split()

_library: Any = torch.library
_registered: list[Any] = []


def _register() -> None:
    """Register the casts and kernels once for the process; they run only under the key, within `kernels_of`."""
    if _registered:
        return
    rest = _library.Library("_", "IMPL")
    rest.fallback(_library.fallthrough_kernel, KEY)
    library = _library.Library("aten", "IMPL")
    cast = set(operators_with_key("AutocastCUDA"))
    policies = ((LOWER, _lower), (FP32, _fp32), (PROMOTED, _promoted), (FP32_RESULT, _fp32_result))
    for names, policy in policies:
        for name in names:
            if f"aten::{name}" in cast:
                library.impl(name, functools.partial(policy, _overload(name)), KEY)
    library.impl("scaled_dot_product_attention", _attention, KEY)
    library.impl("dropout", _dropout, KEY)
    _registered.extend((library, rest))


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _below() -> Any:
    """Send operators called within this guard on to autograd."""
    return key_excluded(_KEYS)


_KEYS = key_set(dispatch_key(KEY))


def _casts() -> bool:
    return torch.is_autocast_enabled("cpu")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the tensors that autocast casts, single or in lists."""
    if isinstance(value, Tensor):
        return value if (now := value.dtype) is dtype or not _is_castable(now) else value.to(dtype)
    return [_cast(item, dtype) for item in value] if isinstance(value, (list, tuple)) else value


def _is_castable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype is not torch.float64


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and _is_castable(value.dtype)


def _called(op: Any, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Call an operator with its arguments in this type."""
    return op(*[_cast(value, dtype) for value in args], **{name: _cast(kwargs[name], dtype) for name in kwargs})


def _lower(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _below():
        if _casts():
            return _called(op, args, kwargs, torch.get_autocast_dtype("cpu"))
        return op(*args, **kwargs)


def _fp32(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _below():
        if _casts() and _target.target != "cpu":
            return _called(op, args, kwargs, torch.float32)
        return op(*args, **kwargs)


def _promoted(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _below():
        types = {value.dtype for value in (*args, *kwargs.values()) if _is_eligible(value)}
        if _casts() and len(types) > 1:
            dtype = torch.float32 if torch.float32 in types else torch.get_autocast_dtype("cpu")
            return _called(op, args, kwargs, dtype)
        return op(*args, **kwargs)


def _fp32_result(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _below():
        arguments = [argument.name for argument in schema_of(op).arguments]
        given = dict(zip(arguments, args, strict=False)) | kwargs
        if _casts() and _target.target != "cpu" and given.get("dtype") is None and _is_eligible(args[0]):
            positional = args[: arguments.index("dtype")] if "dtype" in arguments[: len(args)] else args
            return op(*positional, **{**kwargs, "dtype": torch.float32})
        return op(*args, **kwargs)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    with _below():
        if train and 0 < p < 1 and _target.target in FUSED and x.numel():
            return torch.native_dropout(x, p, train)[0]  # it saves a mask of one byte per element
        return torch.dropout(x, p, train)


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
    """Run attention by the kernel that the target picks."""
    with _below():
        if _casts():
            lower = torch.get_autocast_dtype("cpu")
            query, key, value, attn_mask = (_cast(each, lower) for each in (query, key, value, attn_mask))
        kernel = _attention_kernel(query, key, value, attn_mask, dropout_p, enable_gqa)
        if kernel == "math":
            out = aten._scaled_dot_product_attention_math(
                *(query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa
            )
        elif kernel == "cpu":
            mask = _additive(attn_mask, query.dtype)
            out = aten._scaled_dot_product_flash_attention_for_cpu(
                *(query, key, value, dropout_p, is_causal), attn_mask=mask, scale=scale
            )
        elif kernel == "flash":
            width = query.shape[-1]
            padded = [torch.nn.functional.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value)]
            out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
            return out[0][..., :width]  # type: ignore[no-any-return]
        else:
            needs = any(tensor.requires_grad for tensor in (query, key, value)) and torch.is_grad_enabled()
            mask = _additive(attn_mask, query.dtype)
            if mask is not None:
                mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            out = aten._scaled_dot_product_efficient_attention(
                *(query, key, value, mask, needs, dropout_p, is_causal), scale=scale
            )
        return out[0]  # type: ignore[no-any-return]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn a boolean mask into one that is added to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=META).masked_fill(mask.logical_not(), float("-inf"))


def _attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, grouped: bool
) -> str:
    call = Attention(
        query.dtype,
        query.shape[-1] if query.shape[-1] == key.shape[-1] == value.shape[-1] and query.dim() == 4 else 0,
        mask is not None,
        mask is not None and mask.requires_grad,
        dropout > 0,
        grouped and query.shape[1] != key.shape[1],
    )
    if _target.device is not None and call.width and not call.mask_trains:
        with contextlib.suppress(torch.OutOfMemoryError, torch.AcceleratorError):  # other processes fill the device
            return _picked(_target.device, call)
    return attention_kernel(_target.target, call)


class Attention(NamedTuple):
    """The properties of a call of ``scaled_dot_product_attention`` that decide its kernel."""

    dtype: torch.dtype
    width: int  # of a head; 0 if queries, keys and values differ in it, or are not batches of heads
    masked: bool = False
    mask_trains: bool = False
    drops: bool = False
    grouped: bool = False  # several query heads share a key head


def attention_kernel(target: str, call: Attention) -> str:
    """Return the kernel that a device of that type picks: "flash", "efficient", "cpu" (flash on the CPU) or "math"."""
    if not call.width:
        return "math"
    if target == "cpu":
        return "math" if call.drops or call.grouped or call.mask_trains else "cpu"
    if target not in FUSED or call.dtype is torch.float64:
        return "math"
    if call.dtype in (torch.float16, torch.bfloat16) and not call.masked and call.width <= 256:
        return "flash"
    return "math" if call.grouped else "efficient"


_NAMES = {"FlashAttentionForCpu": "cpu", "FlashAttention": "flash", "CudnnAttention": "flash", "Efficient": "efficient"}


@functools.cache
def _picked(device: torch.device, call: Attention) -> str:
    """Return the kernel that this device picks, by running a tiny attention on it."""
    # Detached: an output that is saved as it is refers to its own node, which would never be freed.
    detached = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    same_numbers = torch.random.fork_rng([torch.accelerator.current_device_index()], device_type=device.type)
    with without_function_modes(), without_dispatch_modes(), torch.enable_grad(), detached, same_numbers:
        query, key = (
            torch.zeros(1, heads, 8, call.width, dtype=call.dtype, device=device, requires_grad=True)
            for heads in (2, 1 if call.grouped else 2)
        )
        mask = torch.zeros(1, 2, 8, 8, dtype=call.dtype, device=device) if call.masked else None
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(query, key, key, mask, dropout_p=0.1 * call.drops, enable_gqa=call.grouped)
        name = "" if out.grad_fn is None else out.grad_fn.name()
    return next((kernel for found, kernel in _NAMES.items() if found in name), "math")

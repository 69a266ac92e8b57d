"""Model code on tensors without data, as if they were on a device: no memory is taken, next to nothing is computed.

1. Every tensor is a meta tensor, and model code is told that it is on the CPU: so it takes its plainest way, everywhere
   the same, and a tensor made on the host mixes with one of the device.
2. What a few numbers decide (token ids, masks, grid sizes: anything small that only depends on such) is computed beside
   it on the CPU, so that ``.item()``, ``nonzero()`` and a mask as an index have an answer. Values stand for storages:
   views and writes in place follow by themselves. What has no answer raises `Unknown`.
3. Kernels are the target's. A dispatch key above autograd that nobody uses is switched on for this thread: there, ops
   are cast as CUDA's autocast casts them, and attention and dropout become the kernels that the target would run.
   Autocast itself, and torch's own choice of kernels, ask for the tensors' device, which meta tensors have not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from .errors import SuperpipelineError

aten = torch.ops.aten
META, HOST = torch.device("meta"), torch.device("cpu")
KEY = "AutocastIPU"  # Rule 3: its place is that of autocast, above autograd
KNOWN_NBYTES = 2**24  # of the integers whose values are known (Rule 2)
KNOWN_FLOATS = 64
FUSED = ("cuda", "xpu")  # device types with fused attention for training

Observer = Callable[[Any, Sequence[Any], dict[str, Any], Any], None]


class Unknown(SuperpipelineError, RuntimeError):
    """Model code asked for a value that is not known before it runs on data."""


class Pretence:
    """A context in which model code runs on tensors without data.

    Args:
        target: The device type whose kernels are counted, such as "cuda".
        autocast: What the precision casts to; None for no autocast.
    """

    def __init__(self, target: str, autocast: torch.dtype | None = None) -> None:
        self.target = target
        self.observe: Observer | None = None  # is told of each operator, with its arguments and its result
        self.building = False  # a module is being made: what its weights begin with does not matter
        self._autocast = autocast
        self._numbers = _Numbers()
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> Pretence:
        _register()
        enter = self._contexts.enter_context
        enter(torch.random.fork_rng(devices=[]))
        enter(_attribute(_State, "target", self.target))
        enter(_key_is_on())
        enter(_Attributes(self._numbers))
        enter(_Operators(self._numbers, self))
        enter(_autocast_flag(self._autocast))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._contexts.close()

    def adopt(self, tensor: Tensor) -> Tensor:
        """The same without data; small integers keep their values."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return self._numbers.adopt(tensor)


class _State:
    target = "cuda"


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# ---- values (Rule 2)


class _Numbers:
    """The values of storages that are known, on the CPU."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """The tensor with its values, if they are known."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(known[1], tensor.storage_offset(), tensor.shape, tensor.stride())

    def knows(self, tensor: Tensor) -> bool:
        """Whether they are known."""
        return tensor.untyped_storage()._cdata in self._known

    def adopt(self, real: Tensor) -> Tensor:
        """A meta tensor in the place of a real one."""
        made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=META)
        self.learn(made, real)
        return made

    def learn(self, tensor: Tensor, values: Tensor) -> None:
        """These are the values of a tensor that has its storage to itself."""
        if is_small(tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = storage, torch.UntypedStorage(storage.nbytes())
            mine = self.of(tensor)
            assert mine is not None
            mine.copy_(values)

    def forget(self, tensor: Tensor) -> None:
        """It was written with something unknown."""
        self._known.pop(tensor.untyped_storage()._cdata, None)


def is_small(tensor: Tensor) -> bool:
    """Whether its values are worth computing."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.numel() <= KNOWN_FLOATS
    return tensor.numel() * tensor.element_size() <= KNOWN_NBYTES


# What a result of these does not depend on is the values of their tensor.
_LIKE = {
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided),
}


class _Operators(TorchDispatchMode):
    """Runs each operator without data, and on values where they are known."""

    def __init__(self, numbers: _Numbers, pretence: Pretence) -> None:
        super().__init__()
        self._numbers = numbers
        self._pretence = pretence
        self._remembered: dict[Any, Any] = {}  # what results look like: layers are alike, and asking takes long

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # Rule 1 is for model code
            return self._operate(func, args, dict(kwargs or {}))

    def _operate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "device" in kwargs:
            kwargs["device"] = META
        tensors = tensors_of(args, kwargs)
        if any(not tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map_only(Tensor, self._without_data, (args, kwargs))
            tensors = tensors_of(args, kwargs)
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default):
            args = (args[0], self._as_integers(args[1]), *args[2:])
        out = self._run(func, args, kwargs, tensors)
        if self._pretence.observe is not None:
            self._pretence.observe(func, args, kwargs, out)
        return out

    def _without_data(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else self._numbers.adopt(tensor)

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        known = self._known(func, tensors)
        if func is aten.masked_select.default and (mask := self._numbers.of(args[1])) is not None:
            return args[0].new_empty(int(mask.expand(args[0].shape).sum()))
        try:
            out = func(*args, **kwargs) if known else self._result(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not known and self._pretence.building and func is aten._local_scalar_dense.default:
                return 0
            if not known or not tensors:
                raise _unknown(func, error) from error
            return self._decided(func, args, kwargs)
        if func._overloadpacket is aten.set_:  # another storage, whose values are known or not
            return out
        if func._schema.is_mutable:
            self._write(func, args, kwargs, known)
        elif known and any(self._is_new(tensor, tensors) for tensor in tensors_of((out,))):
            values = func(*self._values(func, args), **self._values(func, kwargs))
            for tensor, value in zip(tensors_of((out,)), tensors_of((values,)), strict=True):
                if self._is_new(tensor, tensors):
                    self._numbers.learn(tensor, value)
        return out

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tensors as the operator's, which are no views."""
        if not _is_fresh(func):
            return func(*args, **kwargs)
        try:
            asked = (func, _described(args), _described(tuple(kwargs.items())))
            found = self._remembered.get(asked)
        except TypeError:  # something that can not be told apart
            return func(*args, **kwargs)
        if found is None:
            out = func(*args, **kwargs)
            self._remembered[asked] = _described(out) if _is_plain(out) else NotImplemented
            return out
        return func(*args, **kwargs) if found is NotImplemented else _made(found)

    def _known(self, func: Any, tensors: list[Tensor]) -> bool:
        if func._overloadpacket in _LIKE:
            return True
        return all(map(self._numbers.knows, tensors))

    @staticmethod
    def _is_new(tensor: Tensor, inputs: list[Tensor]) -> bool:
        if not is_small(tensor):
            return False
        return tensor.untyped_storage()._cdata not in {other.untyped_storage()._cdata for other in inputs}

    def _write(self, func: Any, args: Any, kwargs: Any, known: bool) -> None:
        if known:
            func(*self._values(func, args), **self._values(func, kwargs))
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_of((value,)):
                    self._numbers.forget(tensor)

    def _decided(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What has a result only with values: numbers, and tensors whose shapes depend on them."""
        values = func(*self._values(func, args), **self._values(func, kwargs))
        return tree_map_only(Tensor, self._numbers.adopt, values)

    def _values(self, func: Any, tree: Any) -> Any:
        def value(tensor: Tensor) -> Tensor:
            known = self._numbers.of(tensor)
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype) if known is None else known

        tree = tree_map_only(Tensor, value, tree)
        return tree_map_only(torch.device, lambda _: HOST, tree)

    def _as_integers(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Masks as indices, as places: how many are set decides the shape."""
        result: list[Tensor | None] = []
        for index in indices:
            values = None if index is None or index.dtype not in (torch.bool, torch.uint8) else self._numbers.of(index)
            if values is None:
                result.append(index)
            else:
                result += [self._numbers.adopt(column) for column in values.nonzero(as_tuple=True)]
        return result


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[Tensor]:
    """The tensors among an operator's arguments or results, which come alone or in lists."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


class _Look(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _described(value: Any) -> Any:
    """What a result's look depends on, or is."""
    if isinstance(value, Tensor):
        return _Look(value.shape, value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(map(_described, value))
    return type(value), value  # 1, 1.0 and True are equal, and give other types


def _made(described: Any) -> Any:
    if isinstance(described, _Look):
        return torch.empty_strided(described.shape, described.stride, dtype=described.dtype, device=META)
    return tuple(map(_made, described))


@functools.cache
def _is_fresh(func: Any) -> bool:
    """Whether all that an operator returns is new."""
    schema = func._schema
    return not schema.is_mutable and not any(value.alias_info for value in (*schema.arguments, *schema.returns))


def _is_plain(out: Any) -> bool:
    return all(isinstance(value, Tensor) and value.is_meta for value in (out if isinstance(out, tuple) else (out,)))


def _unknown(func: Any, error: Exception) -> Exception:
    name = func._overloadpacket.__name__
    return Unknown(f"{name} has no result without data: {str(error).splitlines()[0]}")


# ---- what Python asks of a tensor (Rule 1)

_GET_DEVICE, _GET_META, _GET_CPU = (getattr(Tensor, name).__get__ for name in ("device", "is_meta", "is_cpu"))  # type: ignore[attr-defined]
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_MOVES = (Tensor.cuda, Tensor.cpu)


class _Attributes(TorchFunctionMode):
    """Says that every tensor is on the CPU."""

    def __init__(self, numbers: _Numbers) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_DEVICE:
            return HOST
        if func == _GET_META:
            return False
        if func == _GET_CPU:
            return True
        if func in _MOVES:
            return args[0]
        if func in _READS:
            return func(self._read(args[0]), *args[1:], **(kwargs or {}))
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": HOST}
        if func is Tensor.to:
            args = (args[0], *(HOST if _is_device(value) else value for value in args[1:]))
        return func(*args, **(kwargs or {}))

    def _read(self, tensor: Tensor) -> Tensor:
        values = self._numbers.of(tensor)
        if values is None:
            raise Unknown(f"a tensor of shape {tuple(tensor.shape)} is read as numbers, which it has not without data")
        return values


def _is_device(value: object) -> bool:
    return isinstance(value, str | torch.device | int) and not isinstance(value, bool)


# ---- what runs above autograd (Rule 3)


@contextlib.contextmanager
def _key_is_on() -> Iterator[None]:
    key = getattr(torch._C.DispatchKey, KEY)
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch._C._IncludeDispatchKeyGuard(key):
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)


@contextlib.contextmanager
def _autocast_flag(dtype: torch.dtype | None) -> Iterator[None]:
    """Whether to cast is the CPU's flag, which model code that is told of the CPU turns off and on."""
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])


# CUDA's autocast: what runs in the lower precision, what in FP32, and what is told to give FP32.
LOWER = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding conv_tbc
conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul mm mv
linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""".split()
FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss
nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
pdist cdist renorm logsumexp
""".split()
FP32_RESULT = "prod softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList".split()

_library: list[torch.library.Library] = []


def _register() -> None:
    """Once for the process: without the key, which is this thread's within a `Pretence`, nothing comes here."""
    if _library:
        return
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, KEY)
    library = torch.library.Library("aten", "IMPL")
    for names, policy in ((LOWER, _lower), (FP32, _fp32), (FP32_RESULT, _fp32_result)):
        for name in names:
            library.impl(name, functools.partial(policy, _overload(name)), KEY)
    library.impl("scaled_dot_product_attention", _attention, KEY)
    library.impl("dropout", _dropout, KEY)
    _library.extend((library, rest))


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _below() -> Any:
    """Operators called within go on to autograd."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY)))


def _casts() -> bool:
    return torch.is_autocast_enabled("cpu")


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if _is_eligible(tensor) else tensor, tree)


def _is_eligible(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype is not torch.float64


def _lower(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _below():
        if _casts():
            args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype("cpu"))
        return op(*args, **kwargs)


def _fp32(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _below():
        if _casts() and _State.target != "cpu":
            args, kwargs = _cast((args, kwargs), torch.float32)
        return op(*args, **kwargs)


def _fp32_result(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _below():
        arguments = [argument.name for argument in op._schema.arguments]
        given = dict(zip(arguments, args, strict=False)) | kwargs
        if _casts() and _State.target != "cpu" and given.get("dtype") is None and _is_eligible(args[0]):
            positional = args[: arguments.index("dtype")] if "dtype" in arguments[: len(args)] else args
            return op(*positional, **{**kwargs, "dtype": torch.float32})
        return op(*args, **kwargs)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    with _below():
        if train and 0 < p < 1 and _State.target in FUSED and x.numel():
            return torch.native_dropout(x, p, train)[0]  # which keeps a mask of one byte each
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
    """Attention by the kernel that the target picks."""
    with _below():
        if _casts():
            lower = torch.get_autocast_dtype("cpu")
            query, key, value, attn_mask = _cast((query, key, value, attn_mask), lower)
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
    """A mask of truth values, as what is added to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=META).masked_fill(mask.logical_not(), float("-inf"))


def _attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, grouped: bool
) -> str:
    asked = Attention(
        query.dtype,
        query.shape[-1] if query.shape[-1] == key.shape[-1] == value.shape[-1] and query.dim() == 4 else 0,
        mask is not None,
        mask is not None and mask.requires_grad,
        dropout > 0,
        grouped and query.shape[1] != key.shape[1],
    )
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type == _State.target and asked.width and not asked.mask_trains:
        return _picked(device, asked)
    return attention_kernel(_State.target, asked)


class Attention(NamedTuple):
    """What decides on the kernel for ``scaled_dot_product_attention``."""

    dtype: torch.dtype
    width: int  # of a head; 0 if queries, keys and values differ, or are no batch of heads
    masked: bool = False
    mask_trains: bool = False
    drops: bool = False
    grouped: bool = False  # several heads of queries for one of keys


def attention_kernel(target: str, asked: Attention) -> str:
    """What a device of that type picks: "flash", "efficient", "cpu" (flash on the CPU) or "math"."""
    if not asked.width:
        return "math"
    if target == "cpu":
        return "math" if asked.drops or asked.grouped or asked.mask_trains else "cpu"
    if target not in FUSED or asked.dtype is torch.float64:
        return "math"
    if asked.dtype in (torch.float16, torch.bfloat16) and not asked.masked and asked.width <= 256:
        return "flash"
    return "math" if asked.grouped else "efficient"


_NAMES = {"FlashAttentionForCpu": "cpu", "FlashAttention": "flash", "CudnnAttention": "flash", "Efficient": "efficient"}


@functools.cache
def _picked(device: torch.device, asked: Attention) -> str:
    """What a device that is at hand picks, found by running it on next to nothing."""
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.enable_grad(), unseen:
        query, key = (
            torch.zeros(1, heads, 8, asked.width, dtype=asked.dtype, device=device, requires_grad=True)
            for heads in (2, 1 if asked.grouped else 2)
        )
        mask = torch.zeros(1, 2, 8, 8, dtype=asked.dtype, device=device) if asked.masked else None
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(query, key, key, mask, dropout_p=0.1 * asked.drops, enable_gqa=asked.grouped)
        name = "" if out.grad_fn is None else out.grad_fn.name()
    return next((kernel for found, kernel in _NAMES.items() if found in name), "math")

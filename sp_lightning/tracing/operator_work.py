"""Count what one operator does on the device: its FLOPs, and the bytes of memory that it reads and writes.

1. FLOPs are torch's count. What only some versions of torch count is counted here, as matrix products: attention with
   fewer key heads than query heads, and experts.
2. Each argument is read once and each result is written once, as if no cache held any of it; of a tensor that repeats
   its elements, each element counts once. An operator that writes in place reads what it writes to, unless it only
   fills it.
3. A result that shares memory with an argument moves nothing, nor does memory without values, nor an operator whose
   parts are counted. What collectives move takes the time of their links.
4. Of a table that is looked up as many bytes are read as are returned. To places of a tensor goes what is put there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..compat.tensors import is_collective, operator_of, schema_of, storage_id, written_by
from .fake_tensors import runs_in_parts, tensors_of

aten = torch.ops.aten
_ATTENTION = {  # kernels, and whether each is backward's
    getattr(aten, f"_scaled_dot_product_{kind}{suffix}"): bool(suffix)
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for suffix in ("", "_backward")
}


def _named(*names: str) -> set[Any]:
    return {getattr(aten, name) for name in names if hasattr(aten, name)}


_NOTHING = _named("_unsafe_view", "set_", "resize_", "empty", "empty_like", "empty_strided", "empty_permuted")
_NOTHING |= _named("new_empty", "new_empty_strided")
_FILLS = _named("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_")
_FILLS |= _named("_foreach_copy_", "_foreach_zero_")
_LOOKS_UP = _named("embedding", "index", "index_select", "gather", "take", "nll_loss_forward", "nll_loss2d_forward")
_PUTS = _named("index_put_", "_index_put_impl_", "index_copy_", "index_add_", "scatter_", "scatter_add_")
_IGNORES = dict.fromkeys(_named("nll_loss_backward", "nll_loss2d_backward"), 1)  # the place of what is not read


@functools.cache
def flops_of(func: Any) -> Callable[[Any, Any, Any], float] | None:
    """Return the function that counts an operator's FLOPs (Rule 1), of one that writes in place too, if there is one.

    It takes the operator's arguments and its result.
    """
    operator = operator_of(func)
    if operator in _ATTENTION:
        return lambda args, _kwargs, _out: _attention_flops(_ATTENTION[operator], args)
    if operator is aten.mm:  # the most frequent one; torch's formula takes ten times as long
        return lambda args, _kwargs, _out: 2 * args[0].numel() * args[1].shape[1]
    if operator is aten._grouped_mm:
        return lambda args, _kwargs, _out: _experts_flops(args)
    found = flop_registry.get(operator)
    name = operator.__name__
    if found is None and name.endswith("_") and hasattr(aten, name[:-1]):
        found = flop_registry.get(getattr(aten, name[:-1]))
    return found and (lambda args, kwargs, out: found(*args, **kwargs, out_val=out))


def moved_by(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes of the device's memory that an operator reads and writes (Rules 2 to 4)."""
    operator = operator_of(func)
    if operator in _NOTHING or is_collective(func) or runs_in_parts(func):
        return 0
    read = tensors_of(args, kwargs)
    if schema_of(func).is_mutable:
        written = tensors_of(written_by(func, args, kwargs))
        places = set(map(id, written))
        others = [tensor for tensor in read if id(tensor) not in places]
        if operator in _PUTS:
            return _nbytes(others) + 2 * max(map(_nbytes_of, others), default=0)
        return _nbytes(others if operator in _FILLS else read) + _nbytes(written)
    storages = set(map(_storage, read))
    results = tensors_of((out,))
    made = _nbytes(result for result in results if _storage(result) not in storages)
    if results and not made:
        return 0
    if operator in _LOOKS_UP:
        return made + min(_nbytes_of(read[0]), made) + _nbytes(read[1:])
    if (ignored := _IGNORES.get(operator)) is not None:
        del read[ignored]
    return made + _nbytes(read)


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage()) if tensor.layout is torch.strided else id(tensor)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(_nbytes_of, tensors))


def _nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of the elements that a tensor has in memory (Rule 2)."""
    nbytes = tensor.nbytes
    if nbytes and tensor.layout is torch.strided and 0 in tensor.stride():
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            nbytes //= 1 if stride else size
    return nbytes


def _attention_flops(backward: bool, args: Any) -> int:
    """Count one kernel. Backward computes the scores again, and two products for each of the two of forward."""
    query, key, value = args[backward : backward + 3]
    scores = query.shape[:-1].numel() * key.shape[-2]
    return int(2 * scores * ((3 if backward else 1) * query.shape[-1] + (2 if backward else 1) * value.shape[-1]))


def _experts_flops(args: Any) -> int:
    rows = args[0].shape[-2:].numel() if args[1].dim() == 2 else args[0].numel()
    return int(2 * rows * args[1].shape[-1])

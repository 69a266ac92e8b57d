"""Model code on tensors without data, as if they were on a device: almost no memory, almost no computation.

1. Every tensor is a meta tensor, and model code sees it on the CPU. So model code takes its plainest path, the same on
   every machine, and a tensor made on the host mixes with one of the device.
2. What a few numbers decide (token ids, masks, grid sizes: anything small that depends only on such values) is also
   computed on the CPU, so that ``.item()``, ``nonzero()`` and a mask as an index have an answer. Values are known by
   storage, so views and writes in place need nothing more. What has no answer raises `Unknown`.
3. Kernels and casts are the target device's (fake_kernels.py).
4. What is done to a tensor that consists of others (a quantised weight, a DTensor) is its class's code: what that does
   is seen.
5. Nothing crosses between ranks. What a collective would bring is unknown, also where what it is given is known.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..compat.kernels import body_of
from ..compat.modules import tree_map_only
from ..compat.patches import DETERMINISM_CHECKS, RUN_BACKWARD, shapes_of_dtensors
from ..compat.tensors import (
    FLATTEN,
    TorchDispatchMode,
    dispatch_key,
    has_dtensors,
    is_collective,
    operator_of,
    schema_of,
    storage_id,
    without_dispatch_modes,
    without_function_modes,
    without_sending,
)
from ..errors import SuperpipelineError
from . import fake_kernels

_here = threading.local()  # the mode of the dry run on this thread
aten = torch.ops.aten
META, HOST = torch.device("meta"), torch.device("cpu")
KNOWN_INTEGERS = 2**21  # elements of the largest integer tensor whose values are known (Rule 2): ids, not score masks
KNOWN_FLOATS = 64  # elements of the largest float tensor whose values are known
KNOWN_CONSTANTS = 2**18  # the same for floats filled with one value, such as a mask of ones

Observer = Callable[[Any, Sequence[Any], dict[str, Any], Any], None]


class Unknown(SuperpipelineError, RuntimeError):
    """Model code needs a value that is unknown without data."""


class FakeTensors:
    """A context in which model code runs on tensors without data.

    Args:
        target: The device type whose kernels are counted, such as "cuda".
        autocast: The type that the precision casts to; None for no autocast.
    """

    def __init__(self, target: str, autocast: torch.dtype | None = None) -> None:
        self.target = target
        self.observe: Observer | None = None  # called with each operator, its arguments and its result
        self.building = False  # a module is being made: its initial weights do not matter
        self._autocast = autocast
        self._known_values = _KnownValues()
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> FakeTensors:
        enter = self._contexts.enter_context
        enter(torch.random.fork_rng(devices=[]))
        enter(fake_kernels.kernels_of(self.target, self._autocast))
        enter(_also_in_backward(enter(_Attributes(self._known_values))))
        enter(_Operators(self._known_values, self))
        if has_dtensors():
            enter(_shapes_of_dtensors())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._contexts.close()

    def adopt(self, tensor: Tensor) -> Tensor:
        """Return a tensor like this one without data; values of small tensors stay known."""
        with without_function_modes(), without_dispatch_modes():
            return self._known_values.adopt(tensor)


def without_data() -> bool:
    """Return whether tensors that are made on this thread have no data."""
    return hasattr(_here, "attributes")


# ---- values (Rule 2)


class _KnownValues:
    """The known values of storages, on the CPU."""

    def __init__(self) -> None:
        self._known: dict[int, torch.UntypedStorage] = {}  # by storage, as long as that exists

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor with its values; None if they are unknown."""
        known = self._known.get(storage_id(tensor.untyped_storage()))
        if known is None:
            return None if tensor.numel() else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(known, tensor.storage_offset(), tensor.shape, tensor.stride())

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's values are known, as those of one without elements are."""
        return not tensor.numel() or storage_id(tensor.untyped_storage()) in self._known

    def adopt(self, real: Tensor) -> Tensor:
        """Return a meta tensor in place of a real one; a meta tensor is returned as it is."""
        if real.is_meta:
            return real
        made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=META)
        self.learn(made, real)
        return made

    def learn(self, tensor: Tensor, values: Tensor, floats: int = KNOWN_FLOATS) -> None:
        """Note the values, if it is small, of a tensor that has its storage to itself."""
        if is_small(tensor, floats) and tensor.layout is torch.strided:
            storage, key = tensor.untyped_storage(), storage_id(tensor.untyped_storage())
            if key not in self._known:
                weakref.finalize(storage, self._known.pop, key, None).atexit = False
            self._known[key] = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            mine = self.of(tensor)
            assert mine is not None
            for index, step in enumerate(tensor.stride()):
                if step == 0 and tensor.shape[index]:  # one element for all of them
                    mine, values = mine.narrow(index, 0, 1), values.narrow(index, 0, 1)
            mine.copy_(values)

    def forget(self, tensor: Tensor) -> None:
        """Forget the values of a tensor to which something unknown was written."""
        self._known.pop(storage_id(tensor.untyped_storage()), None)


def is_small(tensor: Tensor, floats: int = KNOWN_FLOATS) -> bool:
    """Whether a tensor has values that are worth computing."""
    if not tensor.numel():
        return False
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (floats if is_float else KNOWN_INTEGERS)


# Results of these do not depend on the values of their tensor.
_LIKE = {
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided),
}
_ALIKE = (aten.ones, aten.zeros, aten.full, aten.ones_like, aten.zeros_like, aten.full_like)
_INDICES = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
_SCALAR, _SELECT = aten._local_scalar_dense.default, aten.masked_select.default
_ODD = {aten.isnan.default, aten.isinf.default}  # which numbers of a run are not


class _Traits(NamedTuple):
    """The traits of an operator, which its schema tells once."""

    body: Callable[..., Any] | None  # runs its parts, of one that inference mode has not taken apart, or of Python
    is_view: bool  # does nothing else than to return another view of its first argument
    is_fresh: bool  # everything that it returns is new
    keeps_shapes: bool  # what it writes to stays where it is, with the shape that it has
    sets: bool  # gives a tensor another storage
    writes: tuple[int, ...] | None  # the places of the arguments that it writes to; None for one that writes to none
    is_like: bool  # does not depend on values of its tensors
    takes_indices: bool
    floats: int  # elements of the largest float result whose values are worth computing
    crosses: bool  # between ranks (Rule 5)

    @classmethod
    def of(cls, func: Any) -> _Traits:
        schema, operator = schema_of(func), operator_of(func)
        changes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        aliases = not schema.is_mutable and len(schema.returns) == 1 and schema.returns[0].alias_info is not None
        named = any(argument.name == "device" for argument in schema.arguments)
        is_composed = func.has_kernel_for_dispatch_key(dispatch_key("CompositeImplicitAutograd"))  # as `to` is
        has_kernel = func.has_kernel_for_dispatch_key(dispatch_key("CPU"))  # as well
        return cls(
            body=body_of(func) or (func.decompose if is_composed and not has_kernel else None),
            is_view=func is aten.set_.source_Storage_storage_offset or (aliases and not named and not is_composed),
            is_fresh=not schema.is_mutable and not any(v.alias_info for v in (*schema.arguments, *schema.returns)),
            keeps_shapes=schema.is_mutable and torch.Tag.inplace_view not in func.tags,
            sets=operator is aten.set_,
            writes=tuple(i for i, change in enumerate(changes) if change) if schema.is_mutable else None,
            is_like=operator in _LIKE,
            takes_indices=func in _INDICES,
            floats=KNOWN_CONSTANTS if operator in _ALIKE else KNOWN_FLOATS,
            crosses=is_collective(func),
        )


_traits_of = functools.cache(_Traits.of)


def runs_in_parts(func: Any) -> bool:
    """Whether an operator is only those that it consists of, which are observed before it."""
    return _traits_of(func).body is not None


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that runs each operator without data, and on values where they are known."""

    def __init__(self, known_values: _KnownValues, context: FakeTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known_values = known_values
        self._context = context
        self._remembered: dict[Any, Any] = {}  # specs of results by call: layers repeat, and finding out takes long

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(hasattr(kind, FLATTEN) for kind in types):  # Rule 4
            return NotImplemented
        with without_function_modes():  # Rule 1 is for model code
            return self._operate(func, _traits_of(func), args, kwargs or {})

    def _operate(self, func: Any, traits: _Traits, args: Any, kwargs: dict[str, Any]) -> Any:
        if traits.is_view and args[0].is_meta:  # of a storage that was seen: nothing to observe or to learn
            try:
                return func(*args, **kwargs)
            except RuntimeError:  # a view of which the shape depends on values: they are looked up below
                pass
        if "device" in kwargs:
            kwargs = {**kwargs, "device": META}
        tensors = tensors_of(args, kwargs)
        if not all(map(_GET_META, tensors)):
            args, kwargs = mapped(Tensor, self._without_data, args), mapped(Tensor, self._without_data, kwargs)
            tensors = tensors_of(args, kwargs)
        if traits.takes_indices:
            args = (args[0], self._as_integers(args[1]), *args[2:])
        out = self._run(func, traits, args, kwargs, tensors)
        if self._context.observe is not None:
            self._context.observe(func, args, kwargs, out)
        return out

    def _without_data(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else self._known_values.adopt(tensor)

    def _run(self, func: Any, traits: _Traits, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if traits.crosses:
            for tensor in tensors:
                self._known_values.forget(tensor)
            return without_sending(func, args, kwargs)
        if traits.body is not None:
            with self:  # its own operators are seen
                return traits.body(*args, **kwargs)
        known = traits.is_like or all(map(self._known_values.knows, tensors))
        if func in _ODD and not known and _here.attributes.takes_as_one():
            return self._known_values.adopt(torch.zeros(args[0].shape, dtype=torch.bool))
        if func is _SELECT and (mask := self._known_values.of(args[1])) is not None:
            return args[0].new_empty(int(mask.expand(args[0].shape).sum()))
        try:
            out = func(*args, **kwargs) if known else self._result(func, traits, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not known and self._context.building and func is _SCALAR:
                return 0
            if not known and func is _SCALAR and _here.attributes.takes_as_one():
                return 1
            if not known or not tensors:
                raise _unknown(func, error) from error
            return self._decided(func, args, kwargs)
        if traits.sets:  # the tensor has another storage now
            return out
        if traits.writes is not None:
            self._write(func, traits.writes, args, kwargs, known)
        elif known:
            self._learn(func, traits.floats, args, kwargs, tensors, out)
        return out

    def _learn(self, func: Any, floats: int, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> None:
        if any(self._is_new(tensor, tensors, floats) for tensor in tensors_of((out,))):
            values = func(*self._values(func, args), **self._values(func, kwargs))
            for tensor, value in zip(tensors_of((out,)), tensors_of((values,)), strict=True):
                if self._is_new(tensor, tensors, floats):
                    self._known_values.learn(tensor, value, floats)

    def _result(self, func: Any, traits: _Traits, args: Any, kwargs: Any) -> Any:
        """Return an operator's result: what an equal call returned before, if that is known, else by a call of it."""
        if not (traits.is_fresh or traits.keeps_shapes):
            return func(*args, **kwargs)
        try:
            call = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else None)
            found = self._remembered.get(call)
        except TypeError:  # an argument that cannot be a key
            return func(*args, **kwargs)
        if found is None:
            out = func(*args, **kwargs)
            if traits.is_fresh:
                self._remembered[call] = _described(out)
            else:
                self._remembered[call] = FIRST if out is args[0] else NotImplemented
            return out
        if found is FIRST:
            return args[0]
        return func(*args, **kwargs) if found is NotImplemented else _made(found)

    @staticmethod
    def _is_new(tensor: Tensor, inputs: list[Tensor], floats: int) -> bool:
        if not is_small(tensor, floats):
            return False
        return storage_id(tensor.untyped_storage()) not in {storage_id(other.untyped_storage()) for other in inputs}

    def _write(self, func: Any, places: tuple[int, ...], args: Any, kwargs: Any, known: bool) -> None:
        if known:
            func(*self._values(func, args), **self._values(func, kwargs))
            return
        for tensor in tensors_of([args[place] for place in places if place < len(args)]):
            self._known_values.forget(tensor)

    def _decided(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose result needs values: a number, or tensors whose shapes depend on them."""
        values = func(*self._values(func, args), **self._values(func, kwargs))
        return tree_map_only(Tensor, self._known_values.adopt, values)

    def _values(self, func: Any, tree: Any) -> Any:
        def value(tensor: Tensor) -> Tensor:
            known = self._known_values.of(tensor)
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype) if known is None else known

        return mapped(torch.device, lambda _: HOST, mapped(Tensor, value, tree))

    def _as_integers(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Turn masks among indices into positions: how many are set decides the shape."""
        result: list[Tensor | None] = []
        for index in indices:
            values = (
                None if index is None or index.dtype not in (torch.bool, torch.uint8) else self._known_values.of(index)
            )
            if values is None:
                result.append(index)
            else:
                result += [self._known_values.adopt(column) for column in values.nonzero(as_tuple=True)]
        return result


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


def _key(value: Any) -> Any:
    """Describe arguments as a key."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_key, value))
    return type(value), value  # 1, 1.0 and True are equal, but lead to different types


FIRST = object()  # in the place of a description: the result is the first argument


class _TensorSpec(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _described(out: Any) -> Any:
    """Describe new tensors so that `_made` can make them again; NotImplemented if it cannot."""
    if isinstance(out, tuple):
        specs = tuple(map(_described, out))
        return NotImplemented if NotImplemented in specs else specs
    plain = isinstance(out, Tensor) and out.is_meta
    return _TensorSpec(out.shape, out.stride(), out.dtype) if plain else NotImplemented


def _made(described: Any) -> Any:
    if type(described) is _TensorSpec:
        shape, stride, dtype = described
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)
    return tuple(map(_made, described))


def _unknown(func: Any, error: Exception) -> Exception:
    name = operator_of(func).__name__
    return Unknown(f"{name} has no result without data: {str(error).splitlines()[0]}")


@contextlib.contextmanager
def _shapes_of_dtensors() -> Iterator[None]:
    """Have torch find out the shapes of DTensors outside of our modes."""
    patch = shapes_of_dtensors()

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with without_function_modes(), without_dispatch_modes():
            return patch.original(*args, **kwargs)

    patch.install(propagate)
    try:
        yield
    finally:
        patch.remove()


# ---- attributes that Python reads (Rule 1)

_GET_DEVICE, _GET_META, _GET_CPU = (getattr(Tensor, name).__get__ for name in ("device", "is_meta", "is_cpu"))
_ANSWERS = {_GET_DEVICE: HOST, _GET_META: False, _GET_CPU: True}
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_MOVES = {Tensor.cuda, Tensor.cpu}
_INDEXED = {Tensor.__getitem__, Tensor.__setitem__}
_LOSS = getattr(torch.nn.functional, "linear_cross_entropy", None)  # torch 2.15
_SPECIAL = {*_ANSWERS, *_MOVES, *_READS, *_INDEXED, Tensor.to}


class _Attributes(TorchFunctionMode):
    """A mode in which every tensor appears to be on the CPU."""

    def __init__(self, known_values: _KnownValues) -> None:
        super().__init__()
        self._known_values = known_values
        self.takes_as_one: Callable[[], bool] = lambda: False
        self.forget = known_values.forget

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SPECIAL or kwargs:
            return self._answer(func, args, kwargs or {})
        return func(*args)

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func]
        if func in _MOVES:
            return args[0]
        if func in _READS:
            with without_function_modes(), without_dispatch_modes():
                return func(self._read(args[0]), *args[1:], **kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": HOST}
        if func in _INDEXED:
            args = (args[0], _index(args[1]), *args[2:])
        if func is _LOSS and kwargs.get("options") is not None:
            kwargs = {**kwargs, "options": fake_kernels.options_on_target(kwargs["options"], args[0].dtype)}
        if func is Tensor.to:
            args = (args[0], *(HOST if _is_device(value) else value for value in args[1:]))
        return func(*args, **kwargs)

    def _read(self, tensor: Tensor) -> Tensor:
        values = self._known_values.of(tensor) if _GET_META(tensor) else tensor  # one from outside has its data
        if values is None and self.takes_as_one():
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        if values is None:
            raise Unknown(f"a tensor of shape {tuple(tensor.shape)} is read as numbers, which are unknown without data")
        return values


@contextlib.contextmanager
def unknown_numbers_are_one(where: Callable[[], bool]) -> Iterator[None]:
    """Take numbers that are read and unknown as one, and all as finite, in this context, while ``where`` says so."""
    attributes = getattr(_here, "attributes", None)
    if attributes is None:  # tensors have data
        yield
        return
    attributes.takes_as_one, before = where, attributes.takes_as_one
    try:
        yield
    finally:
        attributes.takes_as_one = before


def without_values(tensor: Tensor) -> Tensor:
    """Return a tensor whose values are unknown from here on: memory that is allocated, and not written yet."""
    if (attributes := getattr(_here, "attributes", None)) is not None:  # else tensors have data
        attributes.forget(tensor)
    return tensor


@contextlib.contextmanager
def _also_in_backward(attributes: _Attributes) -> Iterator[None]:
    """Keep the mode on in model code that backward runs, as checkpoints do.

    torch passes the call of backward to the mode, and switches the mode off while that call runs.
    """
    _here.attributes = attributes
    RUN_BACKWARD.install(_run_backward)
    # A checkpoint compares the devices of saved tensors. Its hook sees the real one, meta, where an operator of Python
    # saves, and the CPU elsewhere.
    DETERMINISM_CHECKS.install({**DETERMINISM_CHECKS.original, "default": DETERMINISM_CHECKS.original["none"]})
    try:
        yield
    finally:
        DETERMINISM_CHECKS.remove()
        RUN_BACKWARD.remove()
        del _here.attributes


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    with getattr(_here, "attributes", contextlib.nullcontext()):
        return RUN_BACKWARD.original(*args, **kwargs)


def _index(index: Any) -> Any:
    """Turn lists in an index into tensors with known values: torch would make them on the meta device."""
    if isinstance(index, list):
        return torch.tensor(index) if index and all(isinstance(value, int) for value in index) else index
    return tuple(map(_index, index)) if isinstance(index, tuple) else index


def _is_device(value: object) -> bool:
    return isinstance(value, str | torch.device | int) and not isinstance(value, bool)

"""Reads of attributes of modules that code may set.

A read of an attribute that an object has in its ``__dict__`` asks no code, unless its class has a data descriptor of
that name. So the classes get one, for the names that their methods set, for as long as anybody wants to know of reads;
it finds what is there without it. Buffers are attributes, too.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_module_registration_hook

from ..compat.modules import buffer_is_set, tree_map_only

STORES = "STORE_ATTR", "DELETE_ATTR"
# Functions that set attributes whose names are strings.
BY_NAME = {"register_buffer", "setattr", "delattr", "__dict__", "__setattr__"}
Reader = Callable[[nn.Module, str], Any]  # returns what code gets in the stead of what is there, or None
Setter = Callable[[nn.Module, str], None]


class _Missing:
    """The value of an attribute that is not there."""


MISSING = _Missing()


class SeenTensor(Tensor):
    """A tensor of which code has seen that it is there; what code does with it, it does with the tensor itself."""

    value: Tensor
    use: Callable[[], None]  # called before

    @staticmethod
    def of(value: Tensor, use: Callable[[], None]) -> SeenTensor:
        """Return one in the stead of a tensor."""
        seen = value.detach().as_subclass(SeenTensor)
        seen.value, seen.use = value, use
        return seen

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def used(seen: Any) -> Tensor:
            seen.use()
            return seen.value  # type: ignore[no-any-return]

        args, kwargs = tree_map_only(SeenTensor, used, (args, kwargs or {}))
        return func(*args, **kwargs)


class WatchedAttribute:
    """A data descriptor that tells readers of an attribute of a module before it is read."""

    def __init__(self, kind: type, name: str, default: Any) -> None:
        self.kind = kind
        self.name = name
        self.default = default  # the class's own
        self.readers: list[Reader] = []
        self.setters: list[Setter] = []

    def __get__(self, module: Any, owner: type) -> Any:
        if module is not None:
            shown = () if buffer_is_set() else [reader(module, self.name) for reader in self.readers]
            for value in shown:
                if value is not None:
                    return value
            value = module.__dict__.get(self.name, MISSING)
            if value is not MISSING:
                return value
        if self.default is MISSING:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")
        return self.default

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[self.name] = value
        self._tell(module)

    def __delete__(self, module: Any) -> None:
        if self.name not in module.__dict__:
            raise AttributeError(self.name)
        del module.__dict__[self.name]
        self._tell(module)

    def _tell(self, module: Any) -> None:
        for setter in self.setters:
            setter(module, self.name)


@contextlib.contextmanager
def watched(modules: Iterable[nn.Module], reader: Reader, setter: Setter) -> Iterator[set[tuple[type, str]]]:
    """Watch the attributes of modules that their code may set, and buffers; yield which are watched.

    ``reader`` is called before one is read, ``setter`` after one was set, or a buffer or submodule is about to be.
    """
    found = [attribute for kind, name in _settable(modules) if (attribute := _watch(kind, name)) is not None]
    for attribute in found:
        attribute.readers.append(reader)
        attribute.setters.append(setter)

    def registers(module: nn.Module, name: str, value: Any) -> None:
        setter(module, name)

    handles = [
        register_module_buffer_registration_hook(registers),
        register_module_module_registration_hook(registers),
    ]
    try:
        yield {(attribute.kind, attribute.name) for attribute in found}
    finally:
        for handle in handles:
            handle.remove()
        for attribute in found:
            attribute.readers.remove(reader)
            attribute.setters.remove(setter)
            if not attribute.readers:
                delattr(attribute.kind, attribute.name)
                if attribute.default is not MISSING and not hasattr(attribute.kind, attribute.name):
                    setattr(attribute.kind, attribute.name, attribute.default)


def _watch(kind: type, name: str) -> WatchedAttribute | None:
    """Return the descriptor of this name in a class, made if need be; None if none can take the name."""
    own = vars(kind).get(name, MISSING)
    if isinstance(own, WatchedAttribute):
        return own
    default = inspect.getattr_static(kind, name, MISSING)
    if isinstance(default, WatchedAttribute):
        default = default.default
    if hasattr(type(default), "__get__") or (own is not MISSING and own is not default):
        return None
    attribute = WatchedAttribute(kind, name, default)
    try:
        setattr(kind, name, attribute)
    except (TypeError, AttributeError):  # a class in C
        return None
    return attribute


def _settable(modules: Iterable[nn.Module]) -> set[tuple[type, str]]:
    """List the names that code of these modules' classes may set, with the classes."""
    modules = list(modules)
    kinds: set[Any] = {type(module) for module in modules}
    anywhere = {name for kind in kinds for name in names_set(kind)}
    found = {(kind, name) for kind in kinds for name in names_set(kind)}
    taken: set[tuple[type, str]] = set()
    for module in modules:
        kind = type(module)
        found.update((kind, name) for name in anywhere.intersection((*vars(module), *module._buffers)))
        taken.update((kind, name) for name in (*module._parameters, *module._modules, *vars(nn.Module())))
    return found - taken


@functools.lru_cache(maxsize=4096)
def names_set(kind: type) -> frozenset[str]:
    """Return the attributes' names that methods of a module's class set, other than its constructor."""
    found: set[str] = set()
    seen: set[Any] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            if name != "__init__":
                _look(value, found, seen)
    return frozenset(found)


def _look(value: Any, found: set[str], seen: set[Any]) -> None:
    """Add the names that a function sets, or one inside it or inside its decorators."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            stack.append(value.__func__)
        elif isinstance(value, property):
            stack += (value.fget, value.fset, value.fdel)
        elif isinstance(value, functools.partial):
            stack.append(value.func)
        elif isinstance(value, types.FunctionType):
            if value not in seen:
                seen.add(value)
                stack.append(value.__code__)
                for cell in value.__closure__ or ():
                    with contextlib.suppress(ValueError):  # an empty one
                        stack.append(cell.cell_contents)
        elif isinstance(value, types.CodeType) and value not in seen:
            seen.add(value)
            found |= _names_in(value)
            stack += value.co_consts


def _names_in(code: types.CodeType) -> set[str]:
    found = {step.argval for step in dis.get_instructions(code) if step.opname in STORES}
    if not BY_NAME.isdisjoint(code.co_names):
        found.update(text for text in code.co_consts if isinstance(text, str) and text.isidentifier())
    return found

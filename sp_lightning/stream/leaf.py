"""Leaves: what stands for the user's parameters on the device, in the modules and in autograd's graph.

A leaf is one object for the life of the stream; its bytes come and go. Code that kept a leaf (an autograd function on
its `ctx`, an attribute, a returned object) has the bytes brought when a function of torch gets the leaf.

Weights that autocast casts travel in its type. Autocast casts a weight once per use, and autograd sums the gradients of
the casts in the weight's own type; here the host made the cast. The modules have a leaf in the weight's own type, with
a gradient and without bytes. A function in which autocast would cast is lent the bytes that came, by a node whose
backward is that of the cast; any other function gets the weight in its own type, from the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..compat.dynamo import compilation, graph_break
from ..compat.torch import at_end_of_backward, graph_task, storage_id, tree_map_only, without_dispatch
from ..errors import ExactnessError, UnsupportedError
from ..host.device import dense_strides
from .lazy import METADATA, data_of, found_in
from .slots import Slot

DIFFERENTIATING = {torch.autograd.grad, torch.autograd.backward}  # functions that ask for gradients of leaves
CASTING = {F.linear, F.conv1d, F.conv2d, F.conv3d}  # functions in which autocast casts weights; they write to none
CAST_IN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # modules that use their weights in these alone
FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)  # in evaluation one kernel gets all weights inside
NO_CONTEXT: AbstractContextManager[None] = nullcontext()


class Visitor(Protocol):
    """The window of a stream, as leaves and units know it."""

    is_in_call: bool  # whether a call of a streamed module is under way
    is_in_step: bool  # whether the code of a step is

    def using(self, units: Sequence[Any]) -> AbstractContextManager[None]:
        """Keep units on the device meanwhile, under hooks that save their weights as references."""

    def visit(self, unit: Any) -> None:
        """Bring a unit to the device for what compute does next."""

    def look_again(self, unit: Any) -> None:
        """Note that the host may write a unit's weights."""

    def drop(self, unit: Any) -> None:
        """Evict a unit, unless it is held."""


class Collector(Protocol):
    """The way of gradients to the user's parameters, as a parameter knows it."""

    def assign(self, weight: Weight, grad: Tensor) -> Tensor:
        """Make a parameter's gradient of a tensor on the device, which the user assigns."""


class Weight:
    """A parameter of the user's, and the leaf that stands for it on the device."""

    unit: Any  # the one that it travels with (unit.py)
    collector: Collector  # of its gradients
    at: int  # its first byte in the unit
    value: Tensor  # the host's bytes: a plain tensor with the parameter's version
    wire: Tensor  # what travels: the same bytes, or a copy in another type
    leaf: Leaf  # which gets the gradient
    there: Tensor  # the weight on the device: the leaf itself, or what is lent for it
    blank: Tensor  # data of the same form without bytes
    is_part = False  # whether it is one of the tensors that a weight of the user's consists of (WholeWeight)
    is_shard = False  # whether the host's parameter is a DTensor (shards.py)
    form: tuple[torch.Size, tuple[int, ...], int]  # shape, strides and first element of what travels
    place: Any = None  # where in a file its bytes are (store.py); None: they are in memory

    def __init__(
        self, name: str, host: nn.Parameter, slots: list[Slot], dtype: torch.dtype, is_master: bool = False
    ) -> None:
        self.name, self.host, self.slots, self.dtype = name, host, slots, dtype
        self.is_narrow = dtype != host.dtype  # it travels in another type than the host has
        self.is_lent = self.is_narrow and not is_master  # modules have it in the host's type, and are lent the other
        self.nbytes = host.numel() * dtype.itemsize
        self.shown = -1  # version of the host's bytes that the leaf shows
        self.hook: Any = None  # on the leaf, by which its gradient is taken
        self.end_of_graph: Any = None  # autograd's node for the host's parameter itself, which is to get no gradient
        self.lent = -1  # the storage that a function got last for it, in its own type
        self.edits = 0  # steps, and other data that the user assigned
        self.is_stepped_early = False  # stepped beside a backward, and the user has not called the step yet
        self.is_ahead = False  # whether the device has newer bytes than the host: of a resident weight
        self.moved: weakref.ref[Tensor] | None = None  # the copy that the user made last by `weight.to(device)`
        # The user's views of the host's bytes, by their ids.
        self.aliases: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def bytes_of_host(self) -> Tensor:
        """The tensor that has the host's bytes."""
        return self.host

    def leaf_over(self, there: Tensor) -> Any:
        """Make the leaf of a shard."""
        raise NotImplementedError

    def received(self, grad: Tensor) -> Tensor | None:
        """Return the gradient of a shard; None: it is on the host already."""
        raise NotImplementedError

    def deposit(self, content: Any, is_sum: bool) -> None:
        """Put the gradient of a shard into `.grad`, or add it to what is there unless it is the sum."""
        raise NotImplementedError

    def keep_written(self, made: Tensor) -> None:
        """Keep what a function wrote to the tensor that it was given for the weight; raise if that is not possible."""
        if self.is_lent and self.unit.depth:
            raise self.lost_write()
        if self.is_lent:
            self.unit.before_host_access(self)
            with torch.no_grad(), without_dispatch():
                form = made.size(), made.stride(), made.storage_offset()
                self.value.view(made.dtype).as_strided(*form).copy_(made)
        elif not self.unit.depth:  # or the end of the call keeps it
            self.unit.keep_write(self)

    def lost_write(self) -> ExactnessError:
        """Make the error of a write to what travels in another type."""
        what, option = ("autocast", "wire_dtype='as-is'") if self.is_lent else ("computing", "master_weights=False")
        return ExactnessError(
            f"{self.name} was written on the device, where it is {self.dtype} for {what} and the write would be lost:"
            f" set {option}, or write to it between steps"
        )


class Leaf(nn.Parameter):
    """A weight on the device. Only reads of `.data` are noted, whose writes no version shows.

    Its gradient, and whether it requires one, are those of the user's parameter.
    """

    __slots__ = ("weight",)  # its attributes are the user's parameter's
    weight: Weight

    def __hash__(self) -> int:
        return id(self.weight.host)  # a dict of the user's has the parameter

    def __eq__(self, other: Any) -> Any:
        return True if other is self.weight.host or other is self else super().__eq__(other)

    def given_to(self, func: Any) -> Tensor:
        """Return what a function gets, now that the unit is on the device."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def register_hook(self, hook: Any) -> Any:
        """Register a hook on the user's parameter, which gets the gradient."""
        return self.weight.host.register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register a hook on the user's parameter, which gets the gradient."""
        return self.weight.host.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def requires_grad(self) -> bool:
        return self.weight.host.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.weight.host.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Leaf:
        """Set whether the user's parameter, and so the leaf, requires a gradient."""
        self.weight.host.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Any:
        """The user's parameter's gradient: between backwards autograd leaves none here. Compilers find none."""
        return None if compilation() is not None else self.weight.host.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.weight.host.grad = value

    @property
    def data(self) -> Tensor:
        if not self.weight.unit.depth:
            return self.weight.host.data
        with without_dispatch():
            found: Tensor = data_of(self)
            if self.weight not in self.weight.unit.exposed:
                self.weight.unit.exposed[self.weight] = found.clone()
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:  # as `module.to()` has it where nothing changes
            return
        check_form(self.weight, value)
        self.data.copy_(value)
        with without_dispatch():
            increment_version(self)  # what autograd saved of the weight is overwritten, which a plain run keeps


class Absent(Leaf):
    """A leaf without bytes: a function that gets it runs while its unit is on the device."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_dispatch():
            if func in METADATA:
                return func(*args, **(kwargs or {}))
            if func in DIFFERENTIATING:
                edge = torch.autograd.graph.get_gradient_edge
                args, kwargs = tree_map_only(Leaf, edge, (args, kwargs or {}))
                return func(*args, **kwargs)
            graph_break()
            return call_with_leaves(func, args, kwargs or {})


class Narrow(Absent):
    """The leaf of a weight that travels in autocast's type."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        found = self.detach()
        self.weight.unit.copies.append((self.weight, found, version_of(found)))
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:
            self.copy_(value)

    def given_to(self, func: Any) -> Tensor:
        kind = self.device.type
        lends = func in CASTING and torch.is_autocast_enabled(kind)
        lends = lends and torch.get_autocast_dtype(kind) == self.weight.dtype
        lent: Tensor = Lend.apply(self, self.weight, lends)
        self.weight.lent = -1 if lends else storage_id(lent.untyped_storage())
        return lent


class Lend(torch.autograd.Function):
    """The cast of a weight that the host made, or the weight in its own type."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, weight: Weight, is_cast: bool) -> Tensor:
        ctx.weight, ctx.is_cast = weight, is_cast
        if is_cast:
            return weight.there.view_as(weight.there)
        weight.unit.wait_step()
        return weight.value.to(weight.there.device, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.is_cast:
            return grads[0], None, None
        # Laid out as the leaf, which takes it over if it is the only one: its storage tells that nothing was added, as
        # autograd adds in place only to what nobody else refers to.
        like, came = ctx.weight.value, grads[0]
        grad = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=came.device).copy_(came)
        _note_cast(ctx.weight, grad)
        return grad, None, None


# By autograd's number of a backward: the storages of gradients that came through casts, until their sum is taken.
casts: dict[int, dict[Weight, list[torch.UntypedStorage]]] = {}


def _note_cast(weight: Weight, grad: Tensor) -> None:
    """Note a gradient that came through a cast, until its backward ends or another one begins."""
    if (backward := graph_task()) not in casts:
        casts.clear()  # of one that an exception ended
        casts[backward] = {}
        at_end_of_backward(casts.clear)
    casts[backward].setdefault(weight, []).append(grad.untyped_storage())


def has_form_of(weight: Weight, data: Tensor) -> bool:
    """Whether data has the weight's shape, type and memory format."""
    like = weight.value
    return data.shape == like.shape and data.dtype == like.dtype and _strides(data) == _strides(like)


def check_form(weight: Weight, data: Tensor) -> None:
    """Raise if data that the user assigns to a weight has another shape, type or memory format."""
    like = weight.value
    if not has_form_of(weight, data):
        raise UnsupportedError(
            f"{weight.name}.data of {like.dtype} {list(like.shape)} in strides {list(like.stride())} gets"
            f" {data.dtype} {list(data.shape)} in {list(data.stride())}: a streamed weight keeps its shape, type and"
            " strides; convert the model before it is streamed"
        )


def _strides(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(dense_strides(tensor), tensor.shape, strict=True) if size > 1]


def graph_after_close(name: str) -> UnsupportedError:
    """Make the error of a backward through a weight that is streamed no longer."""
    return UnsupportedError(
        f"a graph over {name} is used after close() of the stream that recorded it: call backward before close(), or"
        " run the forward again"
    )


def stepped_already(name: str) -> ExactnessError:
    """Make the error of a second backward through a weight that was stepped beside the first."""
    return ExactnessError(
        f"{name} got another gradient after it was stepped beside the first backward: set optimizer_overlap=False"
    )


def written_between(name: str) -> ExactnessError:
    """Make the error of a backward through a weight that travels in autocast's type and was written since."""
    return ExactnessError(
        f"{name} was stepped or written between a forward and its backward, which in a plain run goes on with what"
        " autocast had cast: set wire_dtype='as-is'"
    )


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version; tensors of inference mode have none."""
    return -1 if tensor.is_inference() else tensor._version


def call_with_leaves(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with leaves, while their units are on the device; keep what it writes to them."""
    leaves, is_nested = [], False
    for value in (*args, *kwargs.values()):
        if isinstance(value, Leaf):
            leaves.append(value)
        elif isinstance(value, (list, tuple, dict)):
            is_nested = True
    if is_nested:
        leaves = list(found_in((args, kwargs), Leaf))
    units = []
    for leaf in leaves:
        unit = leaf.weight.unit
        if (not unit.depth or type(leaf) is Absent) and unit not in units:  # a step in a call may have evicted it
            units.append(unit)
    written: list[tuple[Weight, Tensor, int]] = []  # or not: with the version before

    def give(leaf: Leaf) -> Tensor:
        for weight, made, _ in written:  # it is among the arguments twice
            if weight is leaf.weight:
                return made
        if leaf.weight.is_stepped_early and leaf.weight.unit.is_past_step:
            raise stepped_already(leaf.weight.name)
        made = leaf.given_to(func)
        if func not in CASTING:
            written.append((leaf.weight, made, version_of(made)))
        return made

    with using(units) if units else NO_CONTEXT:
        if is_nested or kwargs:
            args, kwargs = tree_map_only(Leaf, give, (args, kwargs))
        else:
            args = [give(value) if isinstance(value, Leaf) else value for value in args]
        result = func(*args, **kwargs)
        for weight, made, version in written:
            if version_of(made) != version:
                weight.keep_written(made)
            if result is made:
                result = weight.leaf
    return result


@contextmanager
def using(units: Sequence[Any]) -> Iterator[None]:
    """Keep units on the device meanwhile, each by the window of its own stream."""
    with ExitStack() as stack:
        for window in dict.fromkeys(unit.window for unit in units):
            stack.enter_context(window.using([unit for unit in units if unit.window is window]))
        yield


def casts_of(module: nn.Module, dtype: torch.dtype | None, device: str = "cuda") -> set[int]:
    """Find the parameters that autocast to a type casts wherever their modules use them; return their ids.

    Fused kernels get uncast weights, except on CUDA, where torch does not use these kernels under autocast.
    """
    casts: set[int] = set()
    others: set[int] = set()
    for owner in module.modules() if dtype is not None else ():
        if isinstance(owner, FUSED) and device != "cuda":
            others.update(map(id, owner.parameters()))
        for name, param in owner._parameters.items():
            if param is not None:
                is_cast = type(owner) in CAST_IN and name in ("weight", "bias") and param.dtype == torch.float32
                (casts if is_cast else others).add(id(param))
    return casts - others

"""Leaves: tensors that stand for the user's parameters on the device, in the modules and in autograd's graph.

A leaf is one object for the life of the stream; its bytes come and go. Code that kept a leaf (an autograd function on
its `ctx`, an attribute, a returned object) has the bytes brought when a function of torch gets the leaf.

Weights that autocast casts travel in its type. Autocast casts a weight once per use, and autograd sums the gradients of
the casts in the weight's own type; here the host made the cast. The modules have a leaf in the weight's own type, with
a gradient and without bytes. A function in which autocast would cast is lent the bytes that came, by a node whose
backward is that of the cast; any other function gets the weight in its own type, from the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..compat.dynamo import compilation, never_compiled_hook
from ..compat.torch import at_end_of_backward, graph_task, storage_id, without_dispatch
from ..errors import ExactnessError, UnsupportedError
from ..host.device import dense_strides
from .lazy import METADATA, Lazy, data_of, replaced, set_data, version_of

Slot: TypeAlias = tuple[dict[str, Any], str]  # where a module registers a parameter: `_parameters`, and its name

DIFFERENTIATING = {torch.autograd.grad, torch.autograd.backward}  # functions that ask for gradients of leaves
CASTING = {F.linear, F.conv1d, F.conv2d, F.conv3d}  # functions in which autocast casts weights; they write to none
FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)  # in evaluation one kernel gets all weights inside
NO_CONTEXT: AbstractContextManager[None] = nullcontext()


class Weight:
    """A parameter of the user's, and the leaf that stands for it on the device."""

    unit: Any  # with whose weights this one travels (unit.py)
    collector: Any  # of the stream's gradients (gradients.py)
    at: int  # its first byte in the unit
    value: Tensor  # the host's bytes: a plain tensor with the parameter's version
    wire: Tensor  # the host's bytes that travel: those of `value`, or the wire copy
    leaf: Leaf  # gets the gradient on the device
    there: Tensor  # the weight on the device: the leaf itself, or the tensor that is lent for it
    blank: Tensor  # data of the same form without bytes
    is_part = False  # whether it is one of the tensors that a weight of the user's consists of (WholeWeight)
    is_shard = False  # whether the host's parameter is a DTensor (wholes.py)
    form: tuple[torch.Size, tuple[int, ...], int]  # shape, strides and first element in the unit's bytes
    place: Any = None  # where in a file its bytes are (store.py); None: they are in memory

    def __init__(
        self, name: str, host: nn.Parameter, slots: list[Slot], dtype: torch.dtype, is_master: bool = False
    ) -> None:
        self.name, self.host, self.slots, self.dtype = name, host, slots, dtype
        self.is_narrow = dtype != host.dtype  # whether it travels as a wire copy
        self.is_lent = self.is_narrow and not is_master  # whether modules are lent it, and have the host's type
        self.nbytes = host.numel() * dtype.itemsize
        self.shown = -1  # version of the host's bytes that the leaf shows
        self.hook: Any = None  # the handle of the hook that takes the leaf's gradient
        self.end_of_graph: Any = None  # AccumulateGrad of the host's parameter, which is to get no gradient
        self.fixed: Any = None  # a weak reference to the parameter: torch swaps none that has one
        self.edits = 0  # number of steps, and of assignments to `.data`
        self.is_stepped_early = False  # whether it was stepped beside backward, before the user calls the step
        self.is_ahead = False  # of a resident weight: whether the device has newer bytes than the host
        self.moved: weakref.ref[Tensor] | None = None  # the copy that the user made last by `weight.to(device)`
        # The user's views of the host's bytes, by their ids.
        self.aliases: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def description(self) -> str:
        """Describe what all ranks must have alike: name, type, shape, where the bytes are, and whether it trains."""
        place = "in memory" if self.place is None else "in its file"
        trains = "that trains" if self.host.requires_grad else "that is frozen"
        return f"{self.name}, {self.value.dtype} {list(self.value.shape)} {place} {trains}"

    @property
    def bytes_of_host(self) -> Tensor:
        """The tensor over the weight's host bytes: the parameter, or the local shard of a DTensor."""
        return self.host

    def make_leaf(self) -> None:
        """Make the leaf, over `blank` or, in autocast's cast, without bytes; its attributes are the parameter's."""
        if self.is_lent:
            self.there = self.blank.detach()
            empty = torch.empty_like(self.value, device=self.blank.device, requires_grad=False)
            empty.untyped_storage().resize_(0)
            self.leaf = Narrow(empty, requires_grad=False)
        else:
            self.there = self.leaf = Absent(self.blank.detach(), requires_grad=False)
        self.leaf.weight, self.leaf.__dict__ = self, self.host.__dict__

    def received(self, grad: Tensor) -> Tensor | None:
        """Return this rank's part of a DTensor's gradient; None if it was put into `.grad` already."""
        raise NotImplementedError

    def deposit(self, content: Any, is_total: bool) -> None:
        """Add a gradient to a DTensor's `.grad`, or put it there if it is the total already. Blocks for its bytes."""
        raise NotImplementedError

    def keep_written(self, made: Tensor) -> None:
        """Copy a function's write to the weight's tensor on the device to the host; raise if it would be lost.

        During a call of the unit, the end of the call does so.
        """
        if self.is_lent and self.unit.depth:
            raise self.lost_write()
        if self.is_lent:
            self.unit.before_host_access(self)
            with torch.no_grad(), without_dispatch():
                form = made.size(), made.stride(), made.storage_offset()
                self.value.view(made.dtype).as_strided(*form).copy_(made)
        elif not self.unit.depth:
            self.unit.keep_write(self)

    def lost_write(self) -> ExactnessError:
        """Make the error for a write on the device to a weight that has another type there than on the host."""
        what, option = ("autocast", "wire_dtype='as-is'") if self.is_lent else ("computing", "master_weights=False")
        return ExactnessError(
            f"{self.name} was written on the device, where it is {self.dtype} for {what} and the write would be lost:"
            f" set {option}, or write to it between steps"
        )


weights: dict[int, Weight] = {}  # streamed weights, by the id of the parameter


class Leaf(nn.Parameter):
    """A weight on the device. Reads of `.data` are noted, since writes to it move no version.

    Its gradient, and whether it requires one, are those of the user's parameter.
    """

    __slots__ = ("weight",)  # its attributes are the user's parameter's
    weight: Weight

    def __hash__(self) -> int:
        return id(self.weight.host)  # so that a dict of the user's finds the parameter

    def __eq__(self, other: Any) -> Any:
        return True if other is self.weight.host or other is self else super().__eq__(other)

    @property
    def needs_visit(self) -> bool:
        """Whether a function that gets this leaf needs its unit visited: a step inside a call may have evicted it."""
        return not self.weight.unit.depth or type(self) is Absent

    def given_to(self, func: Any) -> Tensor:
        """Return the tensor that a function gets in this leaf's place. The unit is on the device."""
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
        """The gradient of the user's parameter, as autograd leaves none on the leaf; None while torch compiles."""
        return None if compilation() is not None else self.weight.host.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.weight.host.grad = value

    @property
    def data(self) -> Tensor:
        """The device's bytes during a call of the unit, which keeps a clone to find writes; else the host's bytes."""
        if not self.weight.unit.depth:
            return self.weight.host.data
        with without_dispatch():
            found: Tensor = data_of(self)
            if self.weight not in self.weight.unit.exposed:
                self.weight.unit.exposed[self.weight] = found.clone()
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:  # `module.to()` assigns it where nothing changes
            return
        check_form(self.weight, value)
        self.data.copy_(value)
        with without_dispatch():
            increment_version(self)  # saved tensors over these bytes are wrong now; a plain run keeps the old data


class Absent(Leaf):
    """A leaf whose unit may be absent: a function that gets it first brings the unit to the device."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_dispatch():
            if func in METADATA:
                return func(*args, **(kwargs or {}))
            for kind in types:
                if issubclass(kind, Lazy) and not issubclass(kind, LeafView):
                    return NotImplemented  # parameters and gradients decide where the function runs
            if func in DIFFERENTIATING:
                args, kwargs = replaced((args, kwargs or {}), Tensor, edge_of)
                return func(*args, **kwargs)
            return call_with_leaves(func, args, kwargs or {})


class Narrow(Absent):
    """The leaf of a weight that travels in autocast's type: it has the weight's own type, and no bytes."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """A device copy of the weight in its own type; a write to it during a call of the unit is an error."""
        found = self.detach()
        self.weight.unit.copies.append((self.weight, found, version_of(found)))
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:
            self.copy_(value)

    def set_(self, source: Any, *args: Any) -> Any:
        """Keep the weight if it is set to itself, as `register_parametrization` does in a forward; else raise."""
        if source is not self or args:
            raise self.weight.lost_write()
        return self

    def given_to(self, func: Any) -> Tensor:
        """Return the wire copy where autocast would make that cast, else a device copy in the weight's own type."""
        kind = self.device.type
        lends = func in CASTING and torch.is_autocast_enabled(kind)
        lends = lends and torch.get_autocast_dtype(kind) == self.weight.dtype
        lent: Tensor = Lend.apply(self, self.weight, lends)
        return lent


# By autograd's number of a backward: storages of gradients that came through casts, until their sum is taken.
casts: dict[int, dict[Weight, list[torch.UntypedStorage]]] = {}


class Lend(torch.autograd.Function):
    """Autograd's node that lends a weight to a function: the cast that the host made, or the weight in its own type."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, weight: Weight, is_cast: bool) -> Tensor:
        """Return the wire copy on the device if ``is_cast``, else a device copy of the weight in its own type."""
        ctx.weight, ctx.is_cast = weight, is_cast
        if is_cast:
            return weight.there.view_as(weight.there)
        weight.unit.wait_step()
        return weight.value.to(weight.there.device, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient in the weight's own type, and note it if it came through a cast."""
        if not ctx.is_cast:
            return grads[0], None, None
        # A single gradient in the leaf's layout becomes the leaf's own, so its storage tells that nothing was added:
        # autograd adds in place only to tensors to which nothing else refers.
        like, came = ctx.weight.value, grads[0]
        grad = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=came.device).copy_(came)
        if (backward := graph_task()) not in casts:
            casts.clear()  # drop those of a backward that an exception ended
            casts[backward] = {}
            at_end_of_backward(casts.clear)
        casts[backward].setdefault(ctx.weight, []).append(grad.untyped_storage())
        return grad, None, None


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
    """List the strides that a tensor without gaps has in its dimensions of more than one element."""
    return [stride for stride, size in zip(dense_strides(tensor), tensor.shape, strict=True) if size > 1]


def edge_of(tensor: Any) -> Any:
    """Return the gradient edge of the leaf that a tensor is, or that stands for it; another tensor as it is."""
    if (weight := tensor.weight if isinstance(tensor, Leaf) else weights.get(id(tensor))) is None:
        return tensor
    with without_dispatch():
        return torch.autograd.graph.get_gradient_edge(weight.leaf)


def graph_after_close(name: str) -> UnsupportedError:
    """Make the error for a backward through a weight whose stream was closed."""
    return UnsupportedError(
        f"a graph over {name} is used after close() of the stream that recorded it: call backward before close(), or"
        " run the forward again"
    )


def stepped_already(name: str) -> ExactnessError:
    """Make the error for a second backward through a weight that was stepped beside the first."""
    return ExactnessError(
        f"{name} got another gradient after it was stepped beside the first backward: set optimizer_overlap=False"
    )


def written_between(name: str) -> ExactnessError:
    """Make the error for a backward through a weight in autocast's type that was written since its forward."""
    return ExactnessError(
        f"{name} was stepped or written between a forward and its backward, which in a plain run goes on with what"
        " autocast had cast: set wire_dtype='as-is'"
    )


class LeafView(Lazy, Tensor):
    """A view of a weight on the device that the user's code made outside of the weight's own module.

    Functions find the weight's current bytes in it, and their writes to it reach the weight. Its `.data` is the host's.
    """

    weight: Weight
    __torch_function__ = Absent.__torch_function__

    @property
    def needs_visit(self) -> bool:
        """Whether the weight is streamed; else this is a plain view."""
        return weights.get(id(self.weight.host)) is self.weight

    def before(self) -> None:
        """Bring the unit to the device, and point this view at the weight's current bytes there."""
        if self.needs_visit:
            weight, unit = self.weight, self.weight.unit
            with without_dispatch():
                unit.window.visit(unit)
                now = weight.value.to(weight.there.device) if weight.is_lent else unit.memory.flat
                set_data(self, now.view(self.dtype).as_strided(self.size(), self.stride(), self.storage_offset()))

    def given_to(self, func: Any) -> Tensor:
        """Return this view, of the weight's current bytes."""
        self.before()
        return self

    @property
    def data(self) -> Tensor:
        """The same elements of the weight's host bytes."""
        begin = 0 if self.weight.is_lent else self.weight.at // self.itemsize
        at = self.storage_offset() - begin
        return self.weight.host.detach().view(self.dtype).as_strided(self.size(), self.stride(), at)

    @data.setter
    def data(self, data: Tensor) -> None:
        set_data(self, data)


LEAVES = (Leaf, LeafView)


def note_views(weight: Weight, result: Any, given: Tensor) -> None:
    """Make results `LeafView`s that share bytes with the tensor that a function got for a weight.

    In calls of the weight's own unit they stay plain. Storages are compared, as a view in another type has no base.
    """
    if weight.unit.depth:
        return
    storage = storage_id(given.untyped_storage())
    for view in result if isinstance(result, (list, tuple)) else (result,):
        is_strided = type(view) is Tensor and view.layout is torch.strided
        if is_strided and storage_id(view.untyped_storage()) == storage:
            view.__class__ = LeafView
            view.weight = weight


@never_compiled_hook
def call_with_leaves(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that gets leaves and views, with their units on the device, and keep its writes to weights."""
    written: dict[int, tuple[Any, Tensor, int]] = {}  # what the function may write for each, with versions of before
    units: list[Any] = []
    with ExitStack() as held:

        def give(one: Any) -> Any:
            """Return what the function gets in an argument's place: units of leaves and views are on the device."""
            if not isinstance(one, LEAVES):
                return replaced(one, LEAVES, give) if isinstance(one, (list, tuple, dict)) else one
            if id(one) in written:  # it is among the arguments twice
                return written[id(one)][1]
            weight = one.weight
            if one.needs_visit and weight.unit not in units:
                units.append(weight.unit)
                held.enter_context(using([weight.unit]))
            if weight.is_stepped_early and weight.unit.is_past_step:
                raise stepped_already(weight.name)
            given = one.given_to(func)
            if func not in CASTING:
                written[id(one)] = one, given, version_of(given)
            return given

        result = func(*map(give, args), **dict(zip(kwargs, map(give, kwargs.values()), strict=True)))
        for one, made, version in written.values():
            if version_of(made) != version:
                one.weight.keep_written(made)
            if result is made:
                result = one
            else:
                note_views(one.weight, result, made)
    return result


@contextmanager
def using(units: Iterable[Any]) -> Iterator[None]:
    """Keep units on the device in this context, each by the window of its own stream."""
    with ExitStack() as held:
        for unit in units:
            held.enter_context(unit.window.using(unit))
        yield

"""Private names around tensors: the dispatch of functions and operators, autograd, storages, groups, and strings.

Tried with torch 2.11 and 2.15. Functions in C are bound as they are, so that using one costs no call in Python.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from ..errors import UnsupportedError

# ---- dispatch: of functions in Python, of operators in C++, and of transforms

# Without these our own work on weights would be taken for the user's: it would borrow them, and wait for itself.
without_dispatch = torch._C.DisableTorchFunctionSubclass  # of functions by subclasses of Tensor
with_dispatch = torch._C._EnableTorchFunction  # again, by modes too, for what others do inside our own work
without_function_modes = torch._C.DisableTorchFunction  # nor by modes
never_dispatched = torch._C._disabled_torch_function_impl  # the ``__torch_function__`` of a class that takes no part
dispatches: Callable[[], bool] = torch._C._is_torch_function_enabled

# Without these a weight would travel in autocast's type, or a unit be recomputed, where code observes operators or
# transforms them: other results of vmap and grad, or an error.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
outside_transforms = temporarily_clear_interpreter_stack
is_batched_gradient: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


# Without these a selective checkpoint of the user's would count our copies of weights among the operators of the code
# that it runs: where the second run finds other weights on the device than the first, it would raise an error.
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def in_selective_checkpoint() -> bool:
    """Whether a selective checkpoint (``create_selective_checkpoint_contexts``) observes the operators that run now."""
    return dispatch_mode_count() > 0 and isinstance(_get_current_dispatch_mode(), _SELECTIVE)


@contextlib.contextmanager
def outside_selective_checkpoints() -> Iterator[None]:
    """Hide the operators in this context from selective checkpoints."""
    modes = []
    while in_selective_checkpoint():
        modes.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def hide_from_selective_checkpoints(pack: Any, outer: tuple[Any, Any]) -> None:
    """Have a selective checkpoint see the user's hooks behind this pack hook of ours, as behind torch's own."""
    pack._user_hooks = outer[0]._user_hooks if getattr(outer[0], "_checkpoint_internal", False) else outer
    pack._checkpoint_internal = True


# Not None while ``torch.jit.trace`` traces. Without it a graph would have stand-ins for its weights.
tracing_state: Callable[[], Any] = torch._C._get_tracing_state

# Without these nothing could be planned: a dry run observes each operator, looks at what it writes to, and casts as a
# device that is absent would.
without_dispatch_modes = _disable_current_modes
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
operator_of: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")  # without its overload


# ---- autograd: the running backward, its nodes, saved-tensor hooks and version counters

# Without these a read of a weight in backward could not be told from one in forward, nor two backward passes from each
# other; and nothing would know when a backward ends.
graph_task: Callable[[], int] = torch._C._current_graph_task_id  # the number of the running backward; -1: none runs
current_node: Callable[[], Any] = torch._C._current_autograd_node
at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

# Without these ``autograd.grad`` of some weights would accumulate gradients of others, hooks on weights would miss
# gradients, and forward-mode tangents be dropped.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
tensor_hooks: Callable[[Tensor], Any] = operator.attrgetter("_backward_hooks")
HOOKS_AFTER_ACCUMULATION = "_post_accumulate_grad_hooks"  # an attribute that tensors have once there are any
forward_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")


# Without it all gradients would pile up on the device until backward ends (autograd/gradient_nodes.py).
def set_sequence_number(node: Any, number: int) -> None:
    """Set the number of a node, by which autograd chooses among those that are ready: the highest first."""
    node._set_sequence_nr(number)


# Without these nothing that autograd saves could leave the device, or come back for backward.
_hooks: Any = torch._C._autograd
top_hooks: Callable[[bool], Any] = _hooks._top_saved_tensors_default_hooks
push_hooks: Callable[[Any, Any], None] = _hooks._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _hooks._pop_saved_tensors_default_hooks
admits_hooks: Callable[[], bool] = _hooks._saved_tensors_hooks_is_enabled

# Without these copies of a weight's own bytes would count as writes to it, and backward would raise an error.
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = _hooks._unsafe_set_version_counter
preserving_version: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


# The address of the object in C++ behind a tensor, which ``swap_tensors`` exchanges. Without it graphs would lead to
# the wrong one of two swapped weights.
tensor_id: Callable[[Tensor], int] = torch._C.TensorBase._cdata.__get__  # type: ignore[attr-defined]


# ---- storages, and functions that work on bytes

# The address of a storage, by which tensors over the same bytes are known as long as one of them lives. Without it a
# saved tensor could not be told to lie in a unit's buffer.
_cdata: Any = torch._C.StorageBase._cdata  # type: ignore[attr-defined]
storage_id: Callable[[torch.UntypedStorage], int] = _cdata.__get__
StorageReference: Any = StorageWeakRef  # a reference that does not keep the storage
has_storage: Callable[[Tensor], bool] = torch._C._has_storage  # sparse tensors have none

# Makes each access to a storage's bytes an error with this message. Without it a weight whose step is pending, or a
# locked slab in a forked process, would be read as zeros or crash the process.
forbid_access: Callable[[int, str], None] = torch._C._set_storage_data_ptr_access_error_msg

# Without it no gradient could wait in the type in which it came down: torch's own code accumulates into ``.grad``.
without_bytes: Callable[..., Any] = Tensor._make_wrapper_subclass

# Without these a saved tensor would come back with its sign lost, or one without bytes of its own be sent to the host.
negated_view: Callable[[Tensor], Tensor] = torch._neg_view
is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor

# Without it counting the steps of all parameters would take a call for each.
add_to_all: Callable[[list[Tensor], float], Any] = torch._foreach_add_
_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


# So would packing a unit's gradients, or three times as long with the kernel that counts writes (patches.py).
def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy a list of tensors into another one whose versions nobody reads."""
    with torch._C._ExcludeDispatchKeyGuard(_VERSIONS):
        torch._foreach_copy_(targets, sources)


# ---- tensors that consist of tensors: those of libraries that quantise

# Without these a quantised weight of any library could only be refused. torch's compiler knows them by the same names.
FLATTEN, IS_PARAMETER = "__tensor_flatten__", "_is_param"


# Without it a weight's class could not change where the class gives itself out for another.
set_class: Callable[[object, type], None] = vars(object)["__class__"].__set__


def consists_of_tensors(tensor: Tensor) -> bool:
    """Whether a tensor's values lie in other tensors, which are its attributes."""
    return hasattr(type(tensor), FLATTEN)


class Form(NamedTuple):
    """The recipe by which a tensor is made again of the tensors that it consists of; it refers to none of them."""

    kind: Any
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]
    parts: dict[str, Any]  # None: a plain tensor

    def whole(self, parts: Iterator[Tensor], device: torch.device) -> Tensor:
        """Make the whole of its innermost tensors, which lie on this device, in order."""
        inner = {name: next(parts) if form is None else form.whole(parts, device) for name, form in self.parts.items()}
        made: Tensor = self.kind.__tensor_unflatten__(inner, _on(device, self.context), self.shape, self.stride)
        return made


def flattened(tensor: Tensor, name: str = "") -> tuple[Any, list[tuple[str, Tensor]]]:
    """Return the form of a tensor that consists of others, and the innermost of these, with names that begin so."""
    if is_dtensor(tensor):
        return ShardForm(spec_of(tensor)), [(name, local_of(tensor))]
    names, context = getattr(tensor, FLATTEN)()
    forms: dict[str, Any] = {}
    found: list[tuple[str, Tensor]] = []
    for key in names:
        inner = getattr(tensor, key)
        forms[key], parts = None, [(f"{name}.{key}", inner)]
        if consists_of_tensors(inner):
            forms[key], parts = flattened(inner, f"{name}.{key}")
        found += parts
    return Form(tensor.__class__, context, tensor.size(), tensor.stride(), forms), found


def storages_of(tensor: Tensor) -> set[int]:
    """Return the addresses of the storages in which a tensor, or what it consists of, has its bytes."""
    parts = [part for _, part in flattened(tensor)[1]] if consists_of_tensors(tensor) else [tensor]
    return {storage_id(part.untyped_storage()) for part in parts if has_storage(part)}


def attributes_in(tensor: Tensor) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return a tensor with its attributes in Python, and likewise those tensors among these that consist of others."""
    found = [(tensor, dict(vars(tensor)))]
    for value in vars(tensor).values():
        if isinstance(value, Tensor) and consists_of_tensors(value):
            found += attributes_in(value)
    return found


def were_replaced(attributes: list[tuple[Tensor, dict[str, Any]]]) -> bool:
    """Whether any of these attributes is another object now; new ones, as torch's compiler sets, do not count."""
    return any(
        vars(tensor).get(name, tensor) is not value for tensor, before in attributes for name, value in before.items()
    )


def _on(device: torch.device, context: Any) -> Any:
    """Return what a class needs to make a whole, with this device in the place of every one that it names."""
    if isinstance(context, torch.device):
        return device
    if isinstance(context, dict):
        return type(context)({key: _on(device, value) for key, value in context.items()})
    if isinstance(context, (list, tuple)):
        values = [_on(device, value) for value in context]
        return context._make(values) if hasattr(context, "_make") else type(context)(values)
    if is_dataclass(context) and not isinstance(context, type):
        named = {field.name: getattr(context, field.name) for field in fields(context) if field.init}
        moved = {name: device for name, value in named.items() if isinstance(value, torch.device)}
        return replace(context, **moved) if moved else context
    return context


# ---- DTensors: what torch's tensor parallelism makes of parameters

# Without these no shard could lie in a unit, and no gradient keep the layout in which it arrived. The module is
# imported by whoever makes DTensors: importing it takes a second.
_DTENSORS = "torch.distributed.tensor"


def is_dtensor_class(kind: type) -> bool:
    """Whether a class is that of DTensors, or of managed ones."""
    module = sys.modules.get(_DTENSORS)
    return module is not None and issubclass(kind, module.DTensor)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor, managed or not."""
    return is_dtensor_class(type(tensor))


def is_fully_sharded(module: object) -> bool:
    """Whether `fully_shard` was applied to a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, once a collective that makes it is done."""
    return arrived(vars(sys.modules[_DTENSORS].DTensor)["_local_tensor"].__get__(tensor))


def arrived(tensor: Any) -> Tensor:
    """Return what a collective makes, once that is done; any other tensor as it is."""
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor  # type: ignore[no-any-return]


def exchange_shards(one: Tensor, other: Tensor) -> None:
    """Exchange the local tensors and gradients of two DTensors; references to each of them, and its attributes, stay.

    ``swap_tensors`` takes attributes along, and refuses weak references.
    """
    if one.requires_grad and one._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(one).node.register_prehook(_refuse_graph)
    local: Any = vars(sys.modules[_DTENSORS].DTensor)["_local_tensor"]
    shards = local.__get__(one), local.__get__(other)
    local.__set__(one, shards[1])
    local.__set__(other, shards[0])
    torch._C._swap_tensor_impl(one, other)


def _refuse_graph(_grads: Any) -> None:
    raise UnsupportedError(
        "a backward came to a DTensor by a graph that was recorded before its module was streamed, when its shard was "
        "on the device: run the forward again"
    )


def spec_of(tensor: Tensor) -> Any:
    """Return the mesh, the layout and the global shape of a DTensor."""
    return vars(sys.modules[_DTENSORS].DTensor)["_spec"].__get__(tensor)


def over_spec(local: Tensor, spec: Any) -> Tensor:
    """Make a DTensor over a local tensor; no gradient leads from one to the other."""
    return sys.modules[_DTENSORS].DTensor(local, spec, requires_grad=False)  # type: ignore[no-any-return]


def laid_out(spec: Any, like: Any) -> Any:
    """Return the spec of a tensor with the layout of the first of these, and the global strides of the second."""
    return type(spec)(spec.mesh, spec.placements, tensor_meta=like.tensor_meta._replace(dtype=spec.tensor_meta.dtype))


def written_by(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operator writes to, by its schema; each may be a list of tensors."""
    arguments = schema_of(operator).arguments
    given = [*zip(arguments, args, strict=False), *((one, kwargs.get(one.name)) for one in arguments[len(args) :])]
    return [value for one, value in given if one.is_write]


def draws_at_random(operator: Any) -> bool:
    """Whether an operator takes numbers from a random generator."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def writes_to(operator: Any, position: int) -> bool:
    """Whether an operator writes to the argument at this position, by its schema."""
    return schema_of(operator).arguments[position].is_write  # type: ignore[no-any-return]


class ShardForm(NamedTuple):
    """The recipe by which a DTensor is made again of its local tensor."""

    spec: Any

    def whole(self, parts: Iterator[Tensor], device: torch.device) -> Tensor:
        """Make the DTensor of its local tensor."""
        return over_spec(next(parts), self.spec)


# ---- strings

# What torch's code in C++ interns each time that a stream is entered, or the inputs of a recomputed unit are saved: as
# long as something has a string, it is found again. Without these they died each time, some 20 in a step of two units.
# CPython's table of interned strings keeps the place of one that died, and once it is full of them, it is made anew: 8
# MB that go from the heap of whichever thread interns the last one, and leave a hole there. No plain run does that.
INTERNED = tuple(map(sys.intern, ("_ctx_stream", "_ctx_device_index", "is_inplace_on_view")))


# ---- nodes/transport.py: a group that is not one of torch's own list, so that only its members make it


def gloo_group(name: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect the ranks that call this with the same name; the default group's store tells them of each other."""
    from torch.distributed.distributed_c10d import (  # not in each torch
        PrefixStore,
        ProcessGroupGloo,
        _get_default_store,
    )

    store = _get_default_store().clone()  # a connection of its own: others need not wait while this one does
    return ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)


def default_store() -> Any:
    """Return the default group's store."""
    from torch.distributed.distributed_c10d import _get_default_store  # not in each torch

    return _get_default_store()


def store_within(name: str, store: Any) -> Any:
    """Return the part of a store whose keys begin with this name."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in each torch

    return PrefixStore(name, store)


def known_group(group: Any) -> Any:
    """Return a process group; for None, that of all processes."""
    import torch.distributed as dist

    return group or dist.group.WORLD


def members_of(group: Any) -> tuple[list[int], str]:
    """Return the global ranks of a process group's members, and a name that no other group of these has."""
    import torch.distributed as dist

    members = dist.get_process_group_ranks(group)
    return members, f"{group.group_name}/{'-'.join(map(str, members))}"


def gloo_of(group: Any) -> Any:
    """Return the connections of a process group's members for tensors of the host, if they are gloo's; else None."""
    try:
        found = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has a backend for another device alone
        return None
    return found if found.name() == "gloo" else None


def gloo_device(interface: str) -> Any:
    """Bind gloo to a network interface of this name; a RuntimeError if there is none."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo  # not in each torch

    return ProcessGroupGloo.create_device(interface=interface)


# ---- fake tensors


def fake_tensor(mode: Any, meta: Tensor) -> Tensor:
    """Make a tensor without data, on the CPU, of a meta tensor, which has its shape."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor(mode, meta, torch.device("cpu"))


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is one without data."""
    return hasattr(tensor, "fake_mode")


def fake_mode() -> Any:
    """Make a mode in which tensors have no data; a tensor that has some may be an argument."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def needs_values() -> tuple[type[Exception], ...]:
    """Return the errors of operators whose result depends on values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException


def values_of(sparse: Tensor) -> Tensor:
    """Return the values of a sparse tensor, whether it is coalesced or not."""
    return sparse._values()

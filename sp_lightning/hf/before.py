"""``sp_lightning.hf.streaming`` on the core that handle.py replaces: several processes, disks, the device's step.

1. A model is streamed from the moment when stock code would move it to the device: by ``Accelerator.prepare`` or, on an
   accelerator, by ``module.to`` or ``module.cuda``. Public methods are patched meanwhile (compat/accelerate.py).
2. Every model streams: student, reference, reward model, text encoder. Each has a handle of its own. A module of which
   one submodule has all parameters is moved as ever, a layer, a metric, and comes back to the host if it is prepared.
3. A model that is streamed ignores ``.to(device)`` and ``.cpu()``: its place is ours until the context ends, and only
   buffers, and parts without weights, that came later go there. A conversion of type happens. ``model.device`` is
   where it runs, which other code moves to.
4. accelerate keeps its part, autocast, compilation and its list of models, but moves and wraps nothing. Its mark of a
   model that it has prepared says nothing of where that is: copies have it, and so has the model in a later context.
5. A call of the model is a step whatever its ``forward`` is by then, and moves its arguments (runtime/entries.py,
   Rules 8 and 9). So is one of the copy of the model that accelerate makes where it compiles blocks by themselves.
6. Optimizer state is on the host. A step is deferred where that is exact, as in a loop by hand (optimizer_steps.py,
   Rule 4), and a ``zero_grad`` after it waits for nothing (watched_parameters.py,
   Rule 5).
7. A model that other code dropped is closed before the next one begins to stream. A part that streams by itself is
   closed when a module around it begins to, or gets it, and what is on the device beside it streams, too. Of two
   modules that have a part in common the first one streams it, and the other parts of the second one are moved one by
   one.
8. With several processes, a model that stock code would wrap in DDP has one host copy for all of them, from that moment
   on (ranked_model.py). One that is only moved, or that does not train, has one in each. A module around a shared one,
   or around a part of it, that is moved leaves it shared, and its other parts are moved one by one, also if it was
   moved before.
9. The context has to cover training, evaluation and generation. At its end, and after an exception, all patches are
   undone and all models are plain, on the host. One context is open at a time in a process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
import zipfile
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout

from ..autograd.recompute import host_of
from ..compat.dynamo import never_compiled
from ..errors import OptionError, PeerError, UnsupportedError
from ..handles import close_all, close_dropped
from ..memory.device import Device
from ..memory.watched_parameters import is_watched, owner_of
from ..nodes.transport import KEEPALIVE
from ..options import Options
from ..ranks.board import ONE_RANK, OneRank
from ..ranks.connection import broadcast_buffers, connect, leave_at_exit
from ..runtime.handle import Handle, own_state
from ..stream.preparation import move_buffers
from .context import open_contexts as _open
from .patched import function, names_of_accelerate, replace
from .ranked_model import RankedModel

if TYPE_CHECKING:
    from ..compat.accelerate import RunsOn


class streaming:
    """Stream all models that code in this context moves to the device, or prepares with accelerate.

    Args:
        timeout: With several processes, how long each waits for the others.
        keepalive: With several machines, how long nothing comes of one that counts as lost.
        **options: As for ``SuperpipelineStrategy``: ``window``, ``transfer``, ``units``, ``activations``, ... With
            ``master_weights`` FP32 weights are bfloat16 on the device.
    """

    def __init__(
        self,
        timeout: timedelta = default_pg_timeout,
        keepalive: timedelta = KEEPALIVE,
        **options: Any,
    ) -> None:
        self.options = Options.parse(**options)
        if self.options.divide_state:
            allowed = "False: these libraries write the state of one process, and each machine would have a share of it"
            raise OptionError(argument="divide_state", found=True, allowed=allowed)
        self.handles: list[Handle] = []  # of the models that are streamed, in the order in which they began
        self.ranks = ONE_RANK  # others once several processes share a model
        self._shared: weakref.WeakSet[Handle] = weakref.WeakSet()  # those of one copy on all ranks
        self._timeout, self._keepalive = timeout, keepalive
        self._marks: weakref.WeakKeyDictionary[Handle, RunsOn] = weakref.WeakKeyDictionary()
        self._moved: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # as ever (Rule 2)
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> streaming:
        if _open:
            raise UnsupportedError(
                "sp_lightning.hf streams already, and one context is open at a time: close() the other one, or leave "
                "enable() out"
            )
        names = names_of_accelerate("sp_lightning.hf")
        self._names = names
        replacements = {
            names.PREPARE_MODEL: self._prepare_model,
            names.PREPARE_OPTIMIZER: self._prepare_optimizer,
            names.LOAD_STATE: self._load_state,
            names.MODULE_TO: self._to,
            names.MODULE_CUDA: self._cuda,
            names.MODULE_CPU: self._cpu,
            names.DATA_PARALLEL: self._wrap_in_data_parallel,
            names.DISTRIBUTED_DATA_PARALLEL: self._wrap_for_ranks,
        }
        _open.append(self)
        for patch, replacement in replacements.items():
            replace(self._undo, patch, function(patch.original, replacement))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_failure = error is not None and not (isinstance(error, SystemExit) and not error.code)
        if error is not None and is_failure:
            for handle in self.handles:
                handle.team.fail(error)
            self.ranks.fail(isinstance(error, PeerError))
        self.close()

    def close(self) -> None:
        """Make all models plain again, on the host, and undo all patches. Safe twice."""
        if self in _open:
            _open.remove(self)
        with self._undo:
            self._undo.callback(self.ranks.close)
            self._undo.callback(close_all, self.handles)
            for handle in self.handles:
                self._unmark(handle)

    # ---- models

    def take(self, module: nn.Module, device: torch.device) -> None:
        """Begin to stream a module, unless it is streamed, or a part of one that is, as moving it would."""
        if not all(is_watched(parameter) for parameter in module.parameters()):
            parts = set(module.modules())
            shared = (one for one in self.handles if one.module in parts and one in self._shared)
            stays = next(shared, None) or next((one for one in self.handles if _overlaps(one, module)), None)
            if stays is None:
                self._begin(module, device)
            else:
                self._take_around(stays, module)
        self._move_the_rest(module, device)

    def _take_around(self, stays: Handle, module: nn.Module) -> None:
        """Move what a module has beside what this handle streams, which stays as it is (Rules 7 and 8)."""
        place = stays.device.torch_device
        for child in module.children():
            if any(parameter.device != place for parameter in child.parameters()):
                self._to(child, place)
        self._moved.add(module)
        self._names.MODULE_TO.original(module, place)  # its own parameters: those that stream stay where they are
        self._show_devices(module, stays.device)

    def share(self, module: nn.Module, device: torch.device) -> None:
        """Begin to stream one host copy of a module on all ranks, each of which comes here."""
        handle = self.handle_of(module)
        if handle is not None and handle in self._shared:
            self._move_the_rest(module, device)
            return
        if self.ranks is ONE_RANK:
            self.ranks = connect(None, device, self._timeout, None, self._keepalive)
            leave_at_exit(self, self.ranks)
        others = [one for one in self.handles if one.module is not module and one not in self._shared]
        others = [one for one in others if one is handle or _overlaps(one, module)]
        for one in others:  # of modules around this one, or around a part of it
            self._end(one)
        self._shared.add(self._begin(module, device, self.ranks))
        broadcast_buffers(module, self.ranks, None, device)
        for one in others:
            self.take(one.module, device)  # its other parts

    def _move_the_rest(self, module: nn.Module, device: torch.device) -> None:
        """Move what a streamed module has beside its weights: buffers and parts may be new (Rule 3)."""
        first = _streamed(module)
        place = device if first is None else owner_of(first).device.torch_device
        move_buffers(module, place)
        self._move_parts(module, place)

    def _move_parts(self, module: nn.Module, place: torch.device) -> None:
        """Move the parts without weights, which may have tensors that are no buffers, as metrics do."""
        for part in module.modules():
            if next(part.parameters(), None) is None:
                self._names.MODULE_TO.original(part, place)

    def handle_of(self, module: nn.Module) -> Handle | None:
        """Return the handle that streams a module, or one that it is a part of."""
        return next((one for one in self.handles if any(part is module for part in one.module.modules())), None)

    def _begin(self, module: nn.Module, device: torch.device, ranks: OneRank = ONE_RANK) -> Handle:
        parts = set(module.modules())
        inside = [handle for handle in self.handles if handle.module in parts]
        for handle in inside:
            self._end(handle)  # Rule 7
        if inside:
            self._moved.add(module)  # heads are made where ``model.device`` says that it is
        for part in self._moved.intersection(parts):
            self._moved.remove(part)
            self._to_host(part)
        self._check(module)
        close_dropped(self.handles)  # Rule 7
        compute_dtype = torch.bfloat16 if self.options.master_weights else None
        exchanges = ranks.world > 1
        handle = Handle(module, device, self.options, compute_dtype, ranks=ranks, exchanges=exchanges, draws=False)
        handle.steps.by_hand = True
        handle.before_change = self._end_parts
        self.handles.append(handle)
        self._marks[handle] = self._names.mark(module, device)
        self._show_devices(module, handle.device)
        return handle

    def _to_host(self, module: nn.Module) -> None:
        """Move what is on the device to the host, by itself: torch makes quantised weights anew, also on the host."""
        own = (*module._parameters.values(), *module._buffers.values())
        if any(one is not None and one.device.type not in ("cpu", "meta") for one in own):
            self._names.MODULE_TO.original(module, "cpu")
        else:
            for child in module.children():
                self._to_host(child)

    def _end(self, handle: Handle) -> None:
        self._unmark(handle)
        self.handles.remove(handle)
        handle.close()

    def _end_parts(self, module: nn.Module) -> None:
        """Close the handles of parts that a module which streams has got since, and streams itself now (Rule 7)."""
        parts = {part for part in module.modules() if part is not module}
        for handle in [one for one in self.handles if one.module in parts and one not in self._shared]:
            self._end(handle)
            self._move_parts(handle.module, handle.device.torch_device)

    def _show_devices(self, module: nn.Module, device: Device) -> None:
        """Have the classes of a model's parts say where it runs (Rule 3)."""
        for patch in self._names.shown_devices(module):
            if not patch.users and not device.is_host:
                replace(self._undo, patch, property(never_compiled(functools.partial(_device_of, patch.original.fget))))

    def _check(self, module: nn.Module) -> None:
        """Raise an error for what is not built for a model that begins to stream."""
        name = type(module).__name__
        if (part := self._names.dispatched(module)) is not None:
            raise UnsupportedError(
                f"accelerate has dispatched {part or name} already (device_map, cpu_offload, dispatch_model): load the "
                "model without it, on the host"
            )
        if getattr(module, "tp_size", None) not in (None, 1):
            raise UnsupportedError(
                f"{name} has a tensor-parallel plan for {module.tp_size} ranks, and each streams whole layers: load "
                "it without tp_plan"
            )
        away = ((key, p.device) for key, p in module.named_parameters() if p.device.type not in ("cpu", "meta"))
        key, device = next(away, ("", None))
        if device is not None:
            raise UnsupportedError(
                f"{key} is on {device} already, and a model streams from the host: leave out device_map and .cuda(), "
                "and open the context before the model is moved"
            )

    def _unmark(self, handle: Handle) -> None:
        mark = self._marks.pop(handle, None)
        if mark is not None:
            self._names.unmark(handle.module, mark)
            self._move_parts(handle.module, torch.device("cpu"))

    # ---- replacements (Rule 1)

    def _prepare_model(
        self, accelerator: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        prepare = self._names.PREPARE_MODEL.original
        if device_placement is False or not accelerator.device_placement:
            return prepare(accelerator, model, device_placement, evaluation_mode)
        if accelerator.distributed_type not in self._names.PLAIN_TYPES:
            raise UnsupportedError(
                f"accelerate is set up for {accelerator.distributed_type.value}, which shards models itself: leave its "
                "plugin and its options out (deepspeed=, fsdp=), as sp_lightning.hf needs none of them"
            )
        wraps = accelerator.use_distributed and not evaluation_mode and _trains(model)
        (self.share if wraps else self.take)(self._names.inside(model), accelerator.device)
        for part in model.modules():
            if isinstance(part, RankedModel):
                part.stream = self  # which an earlier context made, perhaps
        made = prepare(accelerator, model, device_placement=False, evaluation_mode=evaluation_mode)  # Rule 4
        handle = self.handle_of(self._names.inside(model))
        if handle is not None and made is not model and self._names.copied_from(made) is handle.module:
            handle.runs_as(made)  # Rule 5
        return made

    def _prepare_optimizer(self, accelerator: Any, optimizer: Any, device_placement: Any = None) -> Any:
        if any(handle.steps.manages(optimizer) for handle in self.handles if not handle.closed):
            device_placement = False  # Rule 6
        if "transformers.trainer" in sys.modules and not (resumes := self._names.trainer_resumes()).users:
            replace(self._undo, resumes, function(resumes.original, self._resume))
        return self._names.PREPARE_OPTIMIZER.original(accelerator, optimizer, device_placement)

    def _resume(self, trainer: Any, checkpoint: str | None) -> None:
        """Map the files of an optimizer's state into memory instead of reading them."""
        with contextlib.ExitStack() as undo:
            replace(undo, self._names.LOAD, self._mapped)
            self._names.trainer_resumes().original(trainer, checkpoint)

    def _mapped(self, file: Any, map_location: Any = None, **options: Any) -> Any:
        if zipfile.is_zipfile(file):
            map_location, options = "cpu", {**options, "mmap": True}
        return self._names.LOAD.original(file, map_location, **options)

    def _load_state(self, wrapper: Any, state: Any) -> None:
        self._names.LOAD_STATE.original(wrapper, state)
        handles = [handle for handle in self.handles if not handle.closed and handle.steps.manages(wrapper.optimizer)]
        if hasattr(wrapper.optimizer, "state"):  # else a wrapper that shows nothing of the optimizer which has it
            own_state(wrapper.optimizer, handles)
        for handle in handles:
            handle.settle()

    def _to(self, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        to = self._names.MODULE_TO.original
        device, dtype, _, memory_format = self._names.parse_to(*args, **kwargs)
        in_visit = any(host_of(parameter) is not parameter for parameter in module.parameters())
        if device is None or device.type == "meta" or in_visit:
            return to(module, *args, **kwargs)  # type: ignore[no-any-return]
        is_streamed = any(is_watched(parameter) for parameter in module.parameters())
        if not is_streamed and (device.type == "cpu" or not _is_model(module)):
            self._moved.add(module)
            return to(module, *args, **kwargs)  # type: ignore[no-any-return]
        if dtype is not None:
            to(module, dtype)
        if memory_format is not None:
            to(module, memory_format=memory_format)
        if device.type != "cpu":
            self.take(module, device)  # also if a part of it was streamed
        return module  # Rule 3

    def _cuda(self, module: nn.Module, device: Any = None) -> nn.Module:
        where = "cuda" if device is None else device
        return self._to(module, torch.device("cuda", where) if isinstance(where, int) else torch.device(where))

    def _cpu(self, module: nn.Module) -> nn.Module:
        if _streamed(module) is not None:
            return module  # Rule 3
        return self._names.MODULE_CPU.original(module)  # type: ignore[no-any-return]

    def _wrap_in_data_parallel(self, wrapper: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(is_watched(parameter) for parameter in module.parameters()):
            raise UnsupportedError(
                f"torch's DataParallel would copy {type(module).__name__}, which is streamed, to each of "
                f"{torch.accelerator.device_count()} devices: start a process for each (torchrun, accelerate launch), "
                "or let this one see one device (CUDA_VISIBLE_DEVICES=0)"
            )
        self._names.DATA_PARALLEL.original(wrapper, module, *args, **kwargs)

    def _wrap_for_ranks(self, wrapper: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        first = _streamed(module)
        if first is None or not _trains(module):
            self._names.DISTRIBUTED_DATA_PARALLEL.original(wrapper, module, *args, **kwargs)
            return
        given = inspect.signature(self._names.DISTRIBUTED_DATA_PARALLEL.original).bind(wrapper, module, *args, **kwargs)
        self._names.check_wrapper(type(wrapper), module, given.arguments)
        self.share(module, owner_of(first).device.torch_device)  # also if a part of it was streamed
        wrapper.__class__ = RankedModel
        assert isinstance(wrapper, RankedModel)
        RankedModel.__init__(wrapper, module, self, self._names.sends_buffers(given.arguments))


def _device_of(original: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    """Return where a model runs, if it is streamed, or else what it says itself (Rule 3)."""
    first = next(module.parameters(), None)
    return original(module) if first is None or not is_watched(first) else owner_of(first).device.torch_device


def _is_model(module: nn.Module) -> bool:
    """Whether several modules have parameters of their own (Rule 2)."""
    return sum(any(p is not None for p in part._parameters.values()) for part in module.modules()) > 1


def _overlaps(handle: Handle, module: nn.Module) -> bool:
    """Whether a handle streams weights of a module, and is of a module that is no part of this one."""
    if handle.closed or handle.module in set(module.modules()):
        return False
    return not {*map(id, module.parameters())}.isdisjoint(handle.engine.managed)


def _streamed(module: nn.Module) -> nn.Parameter | None:
    """Return the first of a module's parameters that streams."""
    return next(filter(is_watched, module.parameters()), None)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())

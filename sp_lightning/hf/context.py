"""The context in which models stream that code for accelerate would move to the device.

- A model streams from the moment when stock code would move it: by ``Accelerator.prepare`` or, on an accelerator, by
  ``module.to`` or ``module.cuda``. Each model has a handle: student, reference, reward model, text encoder. A module
  of which one submodule has all parameters is moved as ever, a layer, a metric, until it is prepared.
- A model that streams ignores ``.to(device)``; a conversion of type happens. ``model.device`` is where it runs.
- A module around a model that streams takes it over. One that has but a part of it in common is moved beside it.
- With several processes a model that stock code would wrap in DDP is shared: all of them stream one copy, and
  exchange gradients. What a process moves around it leaves it shared. Each process streams other models by itself.
- The methods that the context replaces are as they were once it is closed, and so are the models.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..compat.accelerate import DISPATCHED, accelerate_precision
from ..compat.dynamo import never_compiled
from ..compat.torch import parse_to
from ..errors import MissingExtraError, UnsupportedError
from ..handle import Handle
from ..handles import close_all, close_dropped, handles_of
from ..host.device import Device
from ..options import Options, format_bytes
from ..ranks.peers import Alone, Peers
from ..stream.leaf import Leaf
from ..stream.parameters import unit_of
from ..stream.preparation import check_values

WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by accelerate's names of mixed precision
PARAMETERS = {  # names of parameters, by the method of accelerate that the context replaces
    "prepare_model": ["model", "device_placement", "evaluation_mode"],
    "prepare_optimizer": ["optimizer", "device_placement"],
    "no_sync": ["model"],
}
STATE_NBYTES = 8  # for a weight that trains: AdamW's, in FP32
SHARE = 0.5  # share of the device's memory for weights, gradients and state; the rest is for activations

log = logging.getLogger(__name__)
open_contexts: list[Any] = []  # at most one


class Streaming:
    """A context that streams a script's models, and replaces methods of torch and accelerate meanwhile."""

    def __init__(self, options: Options, only_if_needed: bool = False, **waits: timedelta) -> None:
        self.options, self._only_if_needed, self._waits = options, only_if_needed, waits
        self.handles: list[Handle] = []  # handles of the models that stream, in the order in which they began
        self._left: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # to stock code; bytes
        self._shown: set[type] = set()  # classes that say where their models run
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Streaming:
        if open_contexts:
            raise UnsupportedError(
                "sp_lightning.hf streams already, and one context is open at a time: close() the other one, or leave "
                "enable() out"
            )
        accelerator = _accelerator()
        open_contexts.append(self)
        self._replace(accelerator, "prepare_model", self._prepare_model)
        self._replace(accelerator, "prepare_optimizer", self._prepare_optimizer)
        self._replace(accelerator, "no_sync", contextlib.contextmanager(self._no_sync))
        self._replace(DistributedDataParallel, "__init__", self._wrap)
        self._replace(nn.Module, "to", self._to)
        self._replace(nn.Module, "cuda", self._cuda)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            for handle in self.handles:
                handle.team.fail(error)
        self.close()

    def close(self) -> None:
        """Make all models plain again, on the host, and put all replaced methods back. A second call does nothing."""
        if self in open_contexts:
            open_contexts.remove(self)
        with self._undo:
            for handle in self.handles:
                self._undo.callback(_move_parts, handle.module, torch.device("cpu"))
            self._undo.callback(close_all, self.handles)

    # ---- what is replaced

    def _replace(self, holder: Any, name: str, by: Callable[..., Any]) -> None:
        """Replace a method until the context closes: ``by`` is called with the original, and the arguments.

        If other code has replaced it since, that stays, and reaches the original once the context is closed.
        """
        original = vars(holder)[name]

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return by(original, *args, **kwargs) if self in open_contexts else original(*args, **kwargs)

        self._put(holder, name, method)

    def _put(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of a class until the context closes, unless other code has set it by then."""
        original = vars(holder)[name]

        def put_back() -> None:
            if vars(holder).get(name) is value:
                setattr(holder, name, original)

        setattr(holder, name, value)
        self._undo.callback(put_back)

    def _prepare_model(
        self, prepare: Any, accelerator: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        """Stand in for Accelerator.prepare_model: stream the model, and add accelerate's autocast and compilation."""
        if device_placement is False or not accelerator.device_placement:
            return prepare(accelerator, model, device_placement, evaluation_mode)
        if not accelerator.distributed_type.name.startswith(("NO", "MULTI_")):
            raise UnsupportedError(
                f"accelerate is set up for {accelerator.distributed_type.value}, which shards models itself: leave its "
                "plugin and its options out (deepspeed=, fsdp=), as sp_lightning.hf needs none of them"
            )
        inside = importlib.import_module("accelerate.utils").extract_model_from_parallel
        module = inside(model, keep_torch_compile=False)
        trains = not evaluation_mode and any(parameter.requires_grad for parameter in module.parameters())
        if self._is_left(module, accelerator.device, trains):
            return prepare(accelerator, model, device_placement, evaluation_mode)
        self.take(module, accelerator.device, accelerator.use_distributed and trains)
        for handle in filter(_is_shared, handles_of(self.handles, module.parameters())):
            _apply_ddp_settings(accelerator.ddp_handler, handle)
        return prepare(accelerator, model, device_placement=False, evaluation_mode=True)  # evaluation mode adds no DDP

    def _no_sync(self, no_sync: Any, accelerator: Any, model: Any) -> Iterator[None]:
        """Stand in for Accelerator.no_sync: also pause the exchange of gradients of a streamed model."""
        with contextlib.ExitStack() as stack:
            for handle in handles_of(self.handles, model.parameters()):
                stack.enter_context(handle.no_sync())
            yield stack.enter_context(no_sync(accelerator, model))

    def _wrap(self, wrap: Any, wrapper: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Stand in for the constructor of DDP: raise for a module that streams."""
        if handles_of(self.handles, module.parameters()):
            raise UnsupportedError(
                f"{type(module).__name__} streams, and DDP around it would not exchange gradients: pass the model to "
                "accelerator.prepare, and leave DistributedDataParallel out"
            )
        wrap(wrapper, module, *args, **kwargs)

    def _prepare_optimizer(self, prepare: Any, accelerator: Any, optimizer: Any, device_placement: Any = None) -> Any:
        """Stand in for Accelerator.prepare_optimizer: leave state to the handles that step the optimizer's weights."""
        handles = handles_of(self.handles, (param for group in optimizer.param_groups for param in group["params"]))
        for handle in handles if "state" in vars(optimizer) else ():  # a wrapper has none of its own
            handle.announce(optimizer)
        return prepare(accelerator, optimizer, False if handles else device_placement)

    def _to(self, to: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Stand in for nn.Module.to: stream a model instead of moving it, and convert its type as ever."""
        device, dtype, _, memory_format = parse_to(*args, **kwargs)
        parameters = list(module.parameters())
        streams = any(unit_of(parameter) is not None for parameter in parameters)
        is_here = device is None or device.type in ("meta", "cpu")
        if leaves := sum(isinstance(parameter, Leaf) for parameter in parameters):  # in a call: they are on the device
            is_there = dtype is None and leaves == len(parameters)
            return module if is_there else to(module, *args, **kwargs)
        if not streams and (is_here or not _is_model(module) or self._is_left(module, device)):
            return to(module, *args, **kwargs)  # type: ignore[no-any-return]
        if streams and device is not None and device.type == "meta":
            self._close_handles(handles_of(self.handles, parameters))
            return to(module, *args, **kwargs)  # type: ignore[no-any-return]
        numbers = [t for t in (*parameters, *module.buffers()) if t.is_floating_point() or t.is_complex()]
        if dtype is not None and any(tensor.dtype != dtype for tensor in numbers):
            self._convert(to, module, dtype)
        if memory_format is not None:
            to(module, memory_format=memory_format)
        if device is not None and not is_here:
            self.take(module, device)
        return module

    def _convert(self, to: Any, module: nn.Module, dtype: torch.dtype) -> None:
        """Convert a module to another type: its handles are closed for that, and it streams again."""
        ended = self._close_handles(handles_of(self.handles, module.parameters()))
        to(module, dtype)
        for handle in ended:
            self.take(handle.module, handle.device.torch_device, _is_shared(handle))

    def _cuda(self, cuda: Any, module: nn.Module, device: Any = None) -> nn.Module:
        """Stand in for nn.Module.cuda: call the module's ``to``."""
        where = "cuda" if device is None else device
        return module.to(torch.device("cuda", where) if isinstance(where, int) else torch.device(where))

    # ---- models

    def take(self, module: nn.Module, device: torch.device, shares: bool = False) -> None:
        """Stream a module, unless it streams already, and move its other tensors to the device.

        Collective with ``shares``: all processes stream one copy.
        """
        parts, of_weights = set(module.modules()), handles_of(self.handles, module.parameters())
        # All of a module's weights may have been replaced since it began to stream.
        around = [handle for handle in self.handles if handle in of_weights or handle.module in parts]
        outside = [handle for handle in around if handle.module not in parts]
        shared = [handle for handle in around if _is_shared(handle)]
        streams = all(unit_of(parameter) is not None for parameter in module.parameters())
        stays = streams and shared == around if shares else streams or shared or outside
        if not stays:
            self._close_handles(around)
            self._open_handle(module, device, shares)
            for handle in outside:
                self.take(handle.module, device)  # its other parts stream again
        found = handles_of(self.handles, module.parameters())
        self._move_rest(module, found[0].device.torch_device if found else device)

    def _open_handle(self, module: nn.Module, device: torch.device, shares: bool) -> None:
        """Create the handle that streams a module. Collective with ``shares``."""
        close_dropped(self.handles)
        world: Any = dist.group.WORLD
        team = Peers(world, **self._waits) if shares else Alone()
        try:
            _check(module)
            _to_host(module)
            wire = torch.bfloat16 if self.options.master_weights else WIRES.get(accelerate_precision())
            handle = Handle(module, device, self.options, team, wire=wire)
        except BaseException as error:
            team.fail(error)
            team.close()
            raise
        handle.before_new = self._end_parts
        self.handles.append(handle)
        if not handle.device.is_host:
            self._show_device(module)

    def _close_handles(self, handles: list[Handle]) -> list[Handle]:
        """Close handles, and move their modules' other parts to the host; return the handles."""
        for handle in handles:
            self.handles.remove(handle)
            handle.close()
            _move_parts(handle.module, torch.device("cpu"))
        return handles

    def _end_parts(self, module: nn.Module) -> None:
        """Close the handles of parts that were added to a model that streams, so that its own handle takes them."""
        check_values(module)
        parts = {part for part in module.modules() if part is not module}
        for handle in self._close_handles([handle for handle in self.handles if handle.module in parts]):
            _move_parts(handle.module, handle.device.torch_device)

    def _move_rest(self, module: nn.Module, device: torch.device) -> None:
        """Move a module's tensors that do not stream: buffers, parts without weights, other parameters."""
        _move_parts(module, device)
        for part in module.modules():
            for parameter in part._parameters.values():
                if parameter is not None and unit_of(parameter) is None:
                    parameter.data = parameter.data.to(device)
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.device != device:
                    part._buffers[name] = buffer.to(device)

    def _show_device(self, module: nn.Module) -> None:
        """Make ``device`` of a model's classes return where it streams to, since code moves inputs there."""
        for kind in {kind for part in module.modules() for kind in type(part).__mro__}:
            shown = vars(kind).get("device")
            if isinstance(shown, property) and kind not in self._shown:
                self._shown.add(kind)
                self._put(kind, "device", property(never_compiled(functools.partial(_device_of, shown.fget))))

    # ---- models that fit

    def _is_left(self, module: nn.Module, device: torch.device | None, trains: bool = True) -> bool:
        """Whether a model is left to stock code, since it fits and ``only_if_needed`` is set; log the decision once."""
        if device is None or module in self._left or handles_of(self.handles, module.parameters()):
            return module in self._left
        needed = sum(_needed(parameter, trains) for parameter in module.parameters())
        others, capacity = sum(self._left.values()), Device(device).memory_capacity()
        fits = needed + others <= SHARE * capacity
        log.info(
            "superpipeline: %s %s: weights, gradients and state take %s beside %s, and the device has %s",
            type(module).__name__,
            ("is left to stock code" if self._only_if_needed else "streams, and would fit (only_if_needed=True)")
            if fits
            else "streams",
            *map(format_bytes, (needed, others, capacity)),
        )
        if fits and self._only_if_needed:
            self._left[module] = needed
        return module in self._left


def _accelerator() -> Any:
    """Return the class accelerate.Accelerator; raise if accelerate is missing, or its methods have other parameters."""
    try:
        accelerate = importlib.import_module("accelerate")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "accelerate":
            raise
        raise MissingExtraError(feature="sp_lightning.hf", package="accelerate", extra="hf") from error
    for name, expected in PARAMETERS.items():
        method = vars(accelerate.Accelerator).get(name)
        found = list(inspect.signature(method).parameters)[1:] if method is not None else []
        if found[: len(expected)] != expected:
            has = f"Accelerator.{name}({', '.join(found)})" if found else "no such method"
            raise UnsupportedError(
                f"sp_lightning.hf needs Accelerator.{name}({', '.join(expected)}), but accelerate "
                f"{accelerate.__version__} has {has}: install accelerate 1.15 and transformers 5"
            )
    return accelerate.Accelerator


def _check(module: nn.Module) -> None:
    """Raise an error for a model that cannot stream: it lacks values, is dispatched already, or is tensor-parallel."""
    name = type(module).__name__
    check_values(module)
    for key, part in module.named_modules():
        if hasattr(part, DISPATCHED):
            raise UnsupportedError(
                f"accelerate has dispatched {key or name} already (device_map, cpu_offload, dispatch_model): load the "
                "model without it, on the host"
            )
    if getattr(module, "tp_size", None) not in (None, 1):
        raise UnsupportedError(
            f"{name} has a tensor-parallel plan for {module.tp_size} ranks, and each streams whole layers: load it "
            "without tp_plan"
        )


def _move_parts(module: nn.Module, device: torch.device) -> None:
    """Move the parts of a module that have no parameters, such as metrics, by their own ``to``."""
    for part in module.modules():
        if next(part.parameters(), None) is None:
            part.to(device)


def _to_host(module: nn.Module) -> None:
    """Move submodules with tensors on the device to the host, such as a head that was made there, and no others."""
    own = (*module._parameters.values(), *module._buffers.values())
    if any(one is not None and one.device.type != "cpu" for one in own):
        module.to("cpu")
    else:
        for child in module.children():
            _to_host(child)


def _needed(parameter: nn.Parameter, trains: bool) -> int:
    """Return the bytes of a weight and, if it trains with its model, of its gradient and optimizer state."""
    size: int = parameter.nbytes
    return 2 * size + STATE_NBYTES * parameter.numel() if trains and parameter.requires_grad else size


def _is_shared(handle: Handle) -> bool:
    """Whether several processes stream one copy of a handle's module."""
    return isinstance(handle.team, Peers)


def _apply_ddp_settings(asked: Any, handle: Handle) -> None:
    """Apply what a script set of DDP to a handle (None: nothing was set); raise for a communication hook."""
    handle.team.follows_buffers = asked is None or asked.broadcast_buffers
    if asked is not None and asked.comm_hook.name != "NO":
        raise UnsupportedError(f"a model that streams has no DDP for comm_hook={asked.comm_hook}: leave it out")


def _device_of(original: Any, module: nn.Module) -> Any:
    """Return the device on which a streamed model runs, or else the value of its own property."""
    unit = unit_of(next(module.parameters(), None))
    return original(module) if unit is None else unit.device.torch_device


def _is_model(module: nn.Module) -> bool:
    """Whether a module counts as a model: several of its submodules own parameters."""
    return sum(any(p is not None for p in part._parameters.values()) for part in module.modules()) > 1

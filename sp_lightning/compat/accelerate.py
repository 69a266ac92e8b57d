"""Names of Hugging Face's accelerate: its methods that are patched, and its mark of where a model runs.

Tried with accelerate 1.15, transformers 5.23 and TRL 1.16. This file is imported when streaming begins, and needs
accelerate; nothing here needs transformers. A method that is gone, or takes other arguments, is an error that names the
installed version.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import accelerate  # type: ignore[import-untyped,unused-ignore]
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.hooks import ModelHook  # type: ignore[import-untyped,unused-ignore]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped,unused-ignore]
from accelerate.utils import extract_model_from_parallel  # type: ignore[import-untyped,unused-ignore]
from torch import nn

from ..errors import UnsupportedError
from .patches import Patch

# hf/before.py, while its context is open. A model would go to the device as a whole, and be wrapped in DDP.
PREPARE_MODEL = Patch(Accelerator, "prepare_model")

# hf/before.py, likewise. The state of an optimizer would make a detour over the device.
PREPARE_OPTIMIZER = Patch(Accelerator, "prepare_optimizer")

# hf/before.py, likewise. An optimizer's state that was loaded would be in memory as a whole until the first step.
LOAD_STATE = Patch(AcceleratedOptimizer, "load_state_dict")

# hf/before.py, while a Trainer reads an optimizer's state. All of it would be in memory, or on each device, at once.
LOAD = Patch(torch, "load")

# hf/before.py, likewise. Trainers, and loops, that move models themselves would not stream them.
MODULE_TO = Patch(nn.Module, "to")

# hf/before.py, likewise. Trainers would copy a streamed model to each device that they see.
DATA_PARALLEL = Patch(nn.DataParallel, "__init__")

# hf/before.py, likewise. accelerate and scripts of several ranks would give each rank gradients of its own.
DISTRIBUTED_DATA_PARALLEL = Patch(nn.parallel.DistributedDataParallel, "__init__")

# hf/before.py, likewise. The whole model would be moved to the device.
MODULE_CUDA = Patch(nn.Module, "cuda")

# hf/before.py, while its context is open. A streamed model's buffers would go to the host, away from weights.
MODULE_CPU = Patch(nn.Module, "cpu")

PATCHES = [PREPARE_MODEL, PREPARE_OPTIMIZER, MODULE_TO, MODULE_CUDA, DATA_PARALLEL, DISTRIBUTED_DATA_PARALLEL]
PATCHES += [LOAD_STATE, LOAD, MODULE_CPU]
PARAMETERS = {  # that the replacements rely on
    PREPARE_MODEL: ["model", "device_placement", "evaluation_mode"],
    PREPARE_OPTIMIZER: ["optimizer", "device_placement"],
    LOAD_STATE: ["state_dict"],
}


# hf/before.py, likewise, if there is a Trainer. It would read an optimizer's state into memory.
@functools.cache
def trainer_resumes() -> Patch:
    """Make the patch of the method by which a Trainer reads an optimizer's state from a checkpoint."""
    transformers = importlib.import_module("transformers")
    patch = Patch(transformers.Trainer, "_load_optimizer_and_scheduler")
    _check(patch, ["checkpoint"], f"transformers {transformers.__version__}")
    return patch


# hf/before.py, likewise, of the classes of models that stream. Code would take a teacher, or a loss, to the host with
# them, where ``model.device`` says that their weights are.
def shown_devices(module: nn.Module) -> list[Patch]:
    """Return the patches of the properties by which the classes of a model's parts say where it is."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    return [_shown_device(kind) for kind in kinds if isinstance(vars(kind).get("device"), property)]


@functools.cache
def _shown_device(kind: type) -> Patch:
    return Patch(kind, "device")


# Attributes of models. Without the first a model that accelerate has dispatched would be streamed over its hooks, and
# without the second a wrapper that was made of a streamed model would be streamed in its place. Without the third the
# forwards of such a copy would be outside of any step.
HOOK = "_hf_hook"
PREPARED = "_is_accelerate_prepared"
ORIGINAL = "_orig_mod"  # of a copy whose blocks are compiled

# Arguments of DDP's wrapper that say among whom gradients are averaged, and how; None is the whole run, in full.
OTHER_AVERAGES = ["process_group", "device_mesh", "mixed_precision", "param_to_hook_all_reduce"]
IGNORED_BY_WRAPPER = "_ddp_params_and_buffers_to_ignore"  # an attribute of modules

# In which one process has one device, or the processes of DDP do.
PLAIN_TYPES = [DistributedType.NO, *(kind for kind in DistributedType if kind.name.startswith("MULTI_"))]

# The device and the type that the arguments of ``module.to`` mean, and whatever else they say.
parse_to: Callable[..., tuple[torch.device | None, torch.dtype | None, bool, Any]] = torch._C._nn._parse_to


def check_wrapper(wrapper: type[nn.Module], module: nn.Module, arguments: dict[str, Any]) -> None:
    """Raise an error unless DDP's wrapper averages the gradients of all parameters over all processes."""
    if wrapper is not nn.parallel.DistributedDataParallel:
        raise UnsupportedError(f"{wrapper.__name__} is a DDP of its own, and a streamed model needs torch's")
    odd = [name for name in OTHER_AVERAGES if arguments.get(name) not in (None, dist.group.WORLD)]
    odd += [IGNORED_BY_WRAPPER] if getattr(module, IGNORED_BY_WRAPPER, None) else []
    if odd:
        raise UnsupportedError(f"a streamed model averages all gradients over all processes: leave {odd[0]} out of DDP")


def sends_buffers(arguments: dict[str, Any]) -> bool:
    """Return whether DDP's wrapper gives all processes the first one's buffers."""
    given = (arguments.get(name) for name in ("forward_sync_buffers", "broadcast_buffers"))
    return next((bool(value) for value in given if value is not None), True)


def check_names() -> None:
    """Raise an error if this version of accelerate is not one that can be patched."""
    for patch, expected in PARAMETERS.items():
        _check(patch, expected, f"accelerate {accelerate.__version__}")


def _check(patch: Patch, expected: list[str], version: str) -> None:
    place = f"{patch.holder.__name__}.{patch.name}"
    function = getattr(patch.original, "__func__", patch.original)  # of a class method
    found = list(inspect.signature(function).parameters)[1:] if callable(function) else None
    if found is None or found[: len(expected)] != expected:
        has = "no such method" if found is None else f"{place}({', '.join(found)})"
        raise UnsupportedError(
            f"sp_lightning.hf needs {place}({', '.join(expected)}), but {version} has {has}: install accelerate 1.15 "
            "and transformers 5, or report this version"
        )


class RunsOn(ModelHook):  # type: ignore[misc]
    """accelerate's mark of a model that is not on the device on which it runs; copies of the model have it as well."""

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device | None = device

    @property
    def execution_device(self) -> torch.device | None:
        """The device, while the model is streamed."""
        return self.device

    def __deepcopy__(self, memo: Any) -> RunsOn:
        return self  # it says of no copy where that is once streaming has ended


def inside(model: nn.Module) -> nn.Module:
    """Return the model inside of what accelerate made of it, if it has prepared this one."""
    return extract_model_from_parallel(model, keep_torch_compile=False) if getattr(model, PREPARED, False) else model


def copied_from(made: nn.Module) -> nn.Module | None:
    """Return the model of which accelerate made this copy, whose blocks are compiled one by one."""
    found: nn.Module | None = vars(made).get(ORIGINAL)
    return found


def mark(module: nn.Module, device: torch.device) -> RunsOn:
    """Mark a model as one that runs on this device."""
    found = RunsOn(device)
    setattr(module, HOOK, found)
    return found


def unmark(module: nn.Module, found: RunsOn) -> None:
    """Remove a mark; the marks of copies say nothing from then on."""
    found.device = None
    if vars(module).get(HOOK) is found:
        delattr(module, HOOK)


def dispatched(module: nn.Module) -> str | None:
    """Return the name of the first part of a model that accelerate has dispatched; None if none was."""
    parts = ((name, getattr(part, HOOK, None)) for name, part in module.named_modules())
    return next((name for name, hook in parts if hook is not None and not isinstance(hook, RunsOn)), None)

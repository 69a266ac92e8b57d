"""The registry of patches: all that the library replaces in torch, for as long as it needs the replacement.

1. The first user of a patch installs it and the last one removes it, in any order and on any thread. So all users of a
   patch pass the same function: what differs between them it finds when it is called.
2. Removing a patch puts back what was there when its first user came, to the very object: users may have patched the
   attribute themselves, after this file was imported. Where they patched over ours meanwhile, theirs stays, with ours
   below it, which is not installed a second time: it would call itself.
3. No other file assigns to attributes of torch. tests/compat/test_patches.py looks at
   all of these after runs of every kind.
4. A new version of torch is tried with that test, and with those that the comments below name. All patches were tried
   with torch 2.11 and 2.15. Without one of them, the sentence above it happens.
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.amp import GradScaler
from torch.autograd import Function
from torch.optim import Optimizer

ABSENT = object()
_lock = threading.RLock()  # reentrant: the garbage collector may close a user within ``install``
ALL: list[Patch] = []


class Patch:
    """An attribute of a class or module of torch that the library replaces at times (Rules 1 and 2)."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder = holder
        self.name = name
        self.users = 0
        self._original: Any = vars(holder).get(name, ABSENT)
        self._replacement: Any = ABSENT
        self._is_covered = False  # by a patch of the user's
        ALL.append(self)

    @property
    def original(self) -> Any:
        """The attribute that our replacement stands in front of, now or once it is installed."""
        found = self._found
        return self._original if self.users or self._is_covered or found is self._replacement else found

    @property
    def _found(self) -> Any:
        return vars(self.holder).get(self.name, ABSENT)

    def install(self, replacement: Any) -> None:
        """Add a user, the first of which puts the replacement in place."""
        with _lock:
            if not self.users:
                self._is_covered = self._is_covered and self._found not in (self._original, self._replacement)
                if not self._is_covered:
                    self._original, self._replacement = self.original, replacement
                    setattr(self.holder, self.name, replacement)
            self.users += 1

    def remove(self) -> None:
        """Take away a user; after the last one, put back what was there."""
        with _lock:
            self.users -= 1
            if self.users:
                return
            if self._found is not self._replacement:
                self._is_covered = self._found is not self._original
            elif self._original is ABSENT:
                delattr(self.holder, self.name)
            else:
                setattr(self.holder, self.name, self._original)


class CountedWrites:
    """A kernel in front of each of torch's functions that write lists of tensors, for as long as there are users."""

    def __init__(self) -> None:
        self.users = 0
        self._kernels: Any = None

    def install(self) -> None:
        """Add a user."""
        with _lock:
            if not self.users:
                self._kernels = torch.library.Library("aten", "IMPL", "ADInplaceOrView")  # type: ignore[no-untyped-call]
                for function, kernel in _counting_kernels():
                    self._kernels.impl(function, kernel, with_keyset=True)
            self.users += 1

    def remove(self) -> None:
        """Take away a user; after the last one, torch's functions are as they were."""
        with _lock:
            self.users -= 1
            if not self.users:
                self._kernels._destroy()


@functools.cache
def _counting_kernels() -> list[tuple[Any, Any]]:
    """List torch's functions that write lists of tensors and count no write, each with a kernel that counts them."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, of = name.partition("::")
        if namespace != "aten" or torch._C._dispatch_has_kernel_for_dispatch_key(name, "ADInplaceOrView"):
            continue
        packet, _, overload = of.partition(".")
        arguments = torch._C._get_schema(f"aten::{packet}", overload).arguments
        lists = [(place, it.name) for place, it in enumerate(arguments) if _is_written_list(it)]
        if lists:
            function = getattr(getattr(torch.ops.aten, packet), overload or "default")
            found.append((function, functools.partial(_count, function, lists)))
    return found


def _is_written_list(argument: Any) -> bool:
    """Whether a function writes this argument, a list; fused optimizers do so to gradients for a GradScaler alone."""
    is_written = argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
    return is_written and isinstance(argument.type, torch.ListType)


def _count(function: Any, lists: list[tuple[int, str]], keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and raise the versions of what it wrote where it has not done so itself."""
    given = [args[place] if place < len(args) else kwargs.get(name, ()) for place, name in lists]
    written = [tensor for tensors in given for tensor in tensors if not tensor.is_inference()]
    before = [tensor._version for tensor in written]
    result = function.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
    unseen = [tensor for tensor, version in zip(written, before, strict=True) if tensor._version == version]
    torch.autograd.graph.increment_version(unseen)
    return result


# autograd/weight_reads.py, while any module is streamed. On a GPU ``torch._foreach_mul_`` and its kin, and fused
# optimizers' kernels, leave the versions of what they write alone: what code inside of a unit or in a step writes with
# them to a weight, a buffer or an average would be lost, or would be written a second time by a recomputed forward.
LIST_WRITES = CountedWrites()

# memory/watched_parameters.py, while any parameter is managed. ``nn.Parameter(p)`` would be a second host parameter
# over the bytes of ``p``, which nothing manages: parametrizations and weight norm would fail at their first read of it.
PARAMETER_NEW = Patch(nn.Parameter, "__new__")

# autograd/weight_reads.py, while any module is streamed. A custom autograd function, and a reentrant checkpoint, that
# is given a weight from outside of its unit would compute on the host: ``apply`` bypasses function dispatch.
FUNCTION_APPLY = Patch(Function, "apply")

# autograd/weight_reads.py, while any module is streamed. A transform (``torch.func``) that is given weights outside of
# their unit would compute with the bytes on the host, and bring gradients past the unit's node: it wraps tensors in
# functions that bypass function dispatch.
TRANSFORM_WRAPPERS = [
    Patch(importlib.import_module(module), name)
    for module, name in (
        ("torch._functorch.eager_transforms", "_wrap_for_grad"),
        ("torch._functorch.eager_transforms", "_wrap_functional_tensor"),
        ("torch._functorch.eager_transforms", "_assert_wrapped_functional"),
        ("torch._functorch.eager_transforms", "_propagate_functional_input_mutation"),
        ("torch._functorch.vmap", "_add_batch_dim"),
        ("torch.autograd.forward_ad", "make_dual"),
    )
]

# autograd/saved_tensors.py, during each visit that autograd records. ``torch.func`` inside a unit, which disables
# saved-tensor hooks, would raise an error because ours are in force.
DISABLE_SAVED_TENSORS_HOOKS = Patch(torch.autograd.graph, "disable_saved_tensors_hooks")

# optim/state_guard.py, while any optimizer's state is guarded. Reading ``optimizer.state`` while a step runs beside
# other work would raise AttributeError instead of waiting.
OPTIMIZER_GETATTR = Patch(Optimizer, "__getattr__")

# optim/host_gradients.py, while any module is streamed. Gradients on the host would be multiplied by a factor that has
# not arrived there: garbage, now and then.
UNSCALE_GRADS = Patch(GradScaler, "_unscale_grads_")

# optim/host_gradients.py, while any module is streamed. Gradients on the host would be multiplied by one, and each
# of several ranks would have a copy of all gradients once they are clipped. `clip_grad_norm_`, which has a list named
# ``grads`` by then, calls this function by this name.
CLIP_GRADIENTS = Patch(importlib.import_module("torch.nn.utils.clip_grad"), "_clip_grads_with_norm_")

# optim/host_gradients.py, while any module is streamed. The norm of gradients on the host would be computed on one
# core, and that of those that are stepped on the device as the host sums it.
TOTAL_NORM = Patch(importlib.import_module("torch.nn.utils.clip_grad"), "_get_total_norm")
PUBLIC_TOTAL_NORM = Patch(importlib.import_module("torch.nn.utils"), "get_total_norm")


# stream/sharded.py, while DTensors are streamed, or made on the host for that. Random numbers for a shard on the host
# would be the host's, the same for each shard and in each call: torch moves on the generator of the mesh's device.
@functools.cache
def drawing_for_dtensors() -> Patch:
    """Make the patch: its module is slow to import."""
    random = importlib.import_module("torch.distributed.tensor._random")
    return Patch(random.OffsetBasedRNGTracker, "_distribute_region")

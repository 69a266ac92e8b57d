"""Nothing of ours is left in torch, Lightning or Python: by the registry's own word, and by theirs."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from side_by_side import blocks, inputs, sgd, squares
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import models
import parity
import sp_lightning
from sp_lightning.compat import patches

HOST = torch.device("cpu")
THEIRS = ("torch", "lightning", "lightning_utilities", "torchmetrics", "builtins", "os", "copy", "copyreg", "pickle")
THEIRS += ("threading", "contextlib", "functools", "gc", "weakref", "inspect", "random", "warnings", "logging")
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, classmethod, staticmethod, property)
DESCRIPTORS = (types.GetSetDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
CODE = (*FUNCTIONS, *DESCRIPTORS, types.WrapperDescriptorType)


class Boom(Exception):
    pass


# ---- what there is, seen without the registry


def package_of(value: Any) -> str:
    """The package whose code this is, or of whose classes an object. Nothing is asked of an object itself: some import
    what they stand for when they are asked."""
    kind = type(value)
    if kind in (types.MethodType, classmethod, staticmethod):
        return package_of(value.__func__)
    if kind is property:
        return package_of(value.fget)
    if kind is functools.partial:
        return package_of(value.func)
    where = value.__module__ if kind is types.FunctionType or issubclass(kind, type) else kind.__module__
    return str(where).partition(".")[0]


def is_ours(value: Any) -> bool:
    return package_of(value) == "sp_lightning"


class MayBeOurs(dict[type, bool]):
    """By type: whether an object of this type may be ours, or a function of ours."""

    def __missing__(self, kind: type) -> bool:
        functions = types.FunctionType, types.MethodType, functools.partial
        return self.setdefault(kind, kind in functions or kind.__module__.partition(".")[0] == "sp_lightning")


MAY_BE_OURS = MayBeOurs()


def noted(value: Any) -> Any:
    """Code, and what is ours, as itself; of a container what of ours is in it."""
    kind = type(value)
    if kind in CODE or issubclass(kind, type) or (MAY_BE_OURS[kind] and is_ours(value)):
        return value
    if issubclass(kind, (list, tuple, set, frozenset, dict)) and value:
        items = list(value.values() if issubclass(kind, dict) else value)
        return [it for it in items if MAY_BE_OURS[type(it)] and is_ours(it)] or None
    return None


def attributes(value: Any) -> Any:
    """What an object's own dictionary has, or a class's."""
    if issubclass(type(value), type):
        return type.__getattribute__(value, "__dict__")
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def seen() -> dict[tuple[str, str, str], Any]:
    """All attributes of their modules, of the classes there and of the objects that these modules have."""
    found: dict[tuple[str, str, str], Any] = {}
    known: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in THEIRS or type(module) is not types.ModuleType:
            continue
        for holder, it in [("", module), *vars(module).items()]:
            kind = type(it)
            if id(it) in known or kind in CODE or (it is not module and package_of(it) not in THEIRS):
                continue
            if not attributes(it):
                continue  # a number, say, which many places may share
            known.add(id(it))
            found[name, holder, ""] = True
            for at, value in list(attributes(it).items()):
                if (note := noted(value)) is not None:
                    found[name, holder, at] = note
    return found


def differences(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    """The attributes that have other code than they had, or more of ours. Modules may have been imported in between."""
    holders = {at[:2] for at in before}
    faults = []
    for at in before.keys() | after.keys():
        was, now = before.get(at), after.get(at)
        if at[:2] in holders and was is not now and (type(was) is not list or was != now):
            faults.append(f"{'.'.join(filter(None, at))}: {was!r} -> {now!r}")
    return sorted(faults)


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """The names of the patches that were installed."""
    names: set[str] = set()
    install = patches.Patch.install

    def noted(self: patches.Patch, replacement: Any) -> None:
        names.add(self.name)
        install(self, replacement)

    monkeypatch.setattr(patches.Patch, "install", noted)
    return names


# ---- runs


def train(handle: Any, net: nn.Module, steps: int = 2) -> None:
    optimizer = sgd(net)
    for x in inputs(HOST, steps):
        optimizer.zero_grad()
        squares(net, x).backward()
        optimizer.step()


def a_loop() -> None:
    net = blocks()
    handle = sp_lightning.stream(net, HOST, window=1, activations="recompute+offload")
    train(handle, net)
    handle.close()
    handle.close()


def failing_at(place: str) -> None:
    """A run that fails in forward, in backward or in the optimizer's step, inside of a visit."""
    net = blocks()
    with contextlib.suppress(Boom), sp_lightning.stream(net, HOST, window=1):
        train(None, net)

        def fail(*_: Any) -> None:
            raise Boom

        optimizer = sgd(net)
        block = net.blocks[2]
        if place == "forward":
            block.register_forward_pre_hook(fail)
        elif place == "backward":
            next(block.parameters()).register_hook(fail)
        else:
            optimizer.register_step_pre_hook(fail)
        squares(net, next(inputs(HOST))).backward()
        optimizer.step()


def a_failing_start() -> None:
    net = blocks()
    with sp_lightning.stream(net.blocks[2], HOST), pytest.raises(sp_lightning.errors.UnsupportedError):
        sp_lightning.stream(net, HOST)


def two_handles(first: int) -> None:
    """Each streams while the other does; the one that stays trains on."""
    nets = blocks(), blocks()
    handles = [sp_lightning.stream(net, HOST, window=1) for net in nets]
    train(handles[1], nets[1])
    train(handles[0], nets[0])
    handles[first].close()
    train(handles[1 - first], nets[1 - first])
    handles[1 - first].close()


class Meeting(nn.Module):
    """Its forward lasts from when it is let in until it is let out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inside, self.leave = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside.set()
        assert self.leave.wait(30)
        return self.linear(x)


def two_threads() -> None:
    """The visit that began first ends first, on another thread."""
    nets = [nn.Sequential(Meeting()), nn.Sequential(Meeting())]
    handles = [sp_lightning.stream(net, HOST, units=["Meeting"]) for net in nets]
    threads = [threading.Thread(target=net, args=(torch.ones(2, 8),)) for net in nets]
    for net, thread in zip(nets, threads, strict=True):
        thread.start()
        assert net[0].inside.wait(30)
    for net, thread in zip(nets, threads, strict=True):
        net[0].leave.set()
        thread.join()
    for handle in handles:
        handle.close()


def compiled() -> None:
    """Blocks that are compiled under autocast, whose weights might have travelled in its type."""
    net = blocks()
    for index in (1, 2):
        net.blocks[index] = torch.compile(net.blocks[index], backend="eager")
    with sp_lightning.stream(net, HOST, window=1), torch.autocast("cpu", torch.bfloat16):
        for x in inputs(HOST, 3):
            squares(net, x).backward()


class Module(models.ZooModule):
    fails_at = -1

    def training_step(self, batch: Any, index: int) -> Any:
        if index == self.fails_at:
            raise Boom
        return super().training_step(batch, index)


def a_fit(precision: Any = "32-true", fails_at: int = -1, streams: bool = True) -> None:
    case = models.case("batch_norm")
    module = Module(case)
    module.fails_at = fails_at
    trainer = L.Trainer(
        strategy=parity.streaming_strategy("cpu", window=1) if streams else "auto",
        accelerator="cpu",
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with contextlib.suppress(Boom):
        trainer.fit(module, models.loader(case, 3))


def a_plan() -> None:
    sp_lightning.plan(blocks, next(inputs(HOST)), machine="rtx4090")


def a_deferred_step() -> None:
    with sp_lightning.stream(blocks(), HOST, window=1) as handle:
        train(handle, handle.module)
        assert handle.stats()["pending_step"] == "deferred"


RUNS: dict[str, Callable[[], None]] = {
    "a loop": a_loop,
    "a deferred step": a_deferred_step,
    "a failing forward": functools.partial(failing_at, "forward"),
    "a failing backward": functools.partial(failing_at, "backward"),
    "a failing step": functools.partial(failing_at, "step"),
    "a failing start": a_failing_start,
    "two handles, the first closed first": functools.partial(two_handles, 0),
    "two handles, the second closed first": functools.partial(two_handles, 1),
    "two threads": two_threads,
    "compiled": compiled,
    "a fit": a_fit,
    "a fit under autocast": functools.partial(a_fit, "bf16-mixed"),
    "a failing fit": functools.partial(a_fit, fails_at=1),
    "a plan": a_plan,
}


def test_after_every_kind_of_run_nothing_is_left_patched(installed):
    # What torch and Lightning patch in themselves, once: when they look for a generator, compile, step and fit.
    assert not isinstance(None, torch.Generator)
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    sgd(blocks())
    a_fit(streams=False)
    before = seen()
    for kind, run in RUNS.items():
        run()
        left = [patch.name for patch in patches.ALL if patch.users]
        there = [vars(patch.holder).get(patch.name, patches.ABSENT) is patch.original for patch in patches.ALL]
        assert not left and all(there), (kind, left)
        assert not patches.LIST_WRITES.users, kind
    assert differences(before, seen()) == []
    # Those of several devices need several processes: loops.py and sharded.py look at them there. Hugging Face's have
    # tests/hf: conftest.py looks at them after each test.
    theirs = getattr(sys.modules.get("sp_lightning.compat.accelerate"), "PATCHES", [])
    others = [patches.drawing_for_dtensors(), *theirs]
    assert installed == {patch.name for patch in patches.ALL if patch not in others}


def bypassed(*_: Any) -> None:
    """A patch that no registry knows."""


bypassed.__module__ = "sp_lightning.somewhere"


BYPASSES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "torch._tensor.Tensor.cpu": lambda patch: patch.setattr(torch.Tensor, "cpu", bypassed),
    "Module.no_such_method": lambda patch: patch.setattr(nn.Module, "no_such_method", bypassed, raising=False),
    "torch.utils.checkpoint.checkpoint": lambda patch: patch.setattr("torch.utils.checkpoint.checkpoint", lambda: None),
    "Module.zero_grad": lambda patch: patch.delattr(nn.Module, "zero_grad"),
    "Trainer.fit": lambda patch: patch.setattr(L.Trainer, "fit", functools.partial(bypassed)),
    "_global_optimizer_pre_hooks": lambda patch: patch.setitem(_global_optimizer_pre_hooks, 10**9, bypassed),
    "builtins.print": lambda patch: patch.setattr("builtins.print", bypassed),
    "start_callbacks": lambda patch: patch.setattr(callback_handler, "start_callbacks", [bypassed]),
}


@pytest.mark.seldom
def test_a_patch_that_bypasses_the_registry_is_noticed(monkeypatch):
    before = seen()
    with monkeypatch.context() as patch:
        for put in BYPASSES.values():
            put(patch)
        faults = differences(before, seen())
    assert [where for where in BYPASSES if not any(where in fault for fault in faults)] == []
    assert differences(before, seen()) == []


def test_a_patch_lasts_from_its_first_user_to_its_last():
    class Holder:
        def present(self) -> int:
            return 1

    plain = vars(Holder)["present"]
    present, absent = patches.Patch(Holder, "present"), patches.Patch(Holder, "absent")
    try:
        for patch in (present, absent):
            patch.install(lambda self: 2)
            patch.install(lambda self: 2)
        present.remove()
        absent.remove()
        assert Holder().present() == Holder().absent() == 2
        present.remove()
        absent.remove()
        assert vars(Holder)["present"] is plain and not hasattr(Holder, "absent")
    finally:
        for patch in (present, absent):
            patches.ALL.remove(patch)


def test_kernels_that_count_writes_last_from_their_first_user_to_their_last():
    def is_there() -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_foreach_mul_.Scalar", "ADInplaceOrView")

    kernels, said = patches.CountedWrites(), [is_there()]
    for change in (kernels.install, kernels.install, kernels.remove, kernels.remove, kernels.install, kernels.remove):
        change()
        said.append(is_there())
    assert said == [False, True, True, True, False, True, False]


def test_a_fused_step_counts_as_a_write_of_weights_and_not_of_gradients():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight], fused=True)
    kernels = patches.CountedWrites()
    kernels.install()
    try:
        optimizer.step()
    finally:
        kernels.remove()
    assert (weight._version, weight.grad._version, optimizer.state[weight]["exp_avg"]._version) == (1, 0, 1)


def counting(calls, applied):
    def apply(kind, *args, **kwargs):
        calls.append(kind.__name__)
        return applied.__get__(None, kind)(*args, **kwargs)

    return classmethod(apply)


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_patch_of_the_users_over_a_patched_name_is_called_and_stays(moment, monkeypatch):
    calls, net, x = [], blocks(), next(inputs(HOST))
    if moment == "before":
        monkeypatch.setattr(torch.autograd.Function, "apply", counting(calls, vars(torch.autograd.Function)["apply"]))
    for _ in range(2):
        with sp_lightning.stream(net, HOST, window=1):
            if moment == "meanwhile" and not calls:
                over = counting(calls, vars(torch.autograd.Function)["apply"])
                monkeypatch.setattr(torch.autograd.Function, "apply", over)
            checkpoint(net, x.requires_grad_(), use_reentrant=True).sum().backward()
    checkpoint(net, x, use_reentrant=True)
    assert calls.count("CheckpointFunction") == 3

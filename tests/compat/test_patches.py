"""Nothing of ours is left in torch, Lightning or Python when no run is under way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from side_by_side import blocks, inputs, training
from torch.utils.checkpoint import checkpoint

import models
import parity
from sp_lightning.compat import patches
from sp_lightning.runtime.handle import stream

HOST = torch.device("cpu")


def a_loop(fails_at: str = "") -> None:
    """A run by hand, which may fail in forward or in backward, inside of a visit."""
    net = blocks()
    with contextlib.suppress(ZeroDivisionError), stream(net, HOST, window=1, activations="recompute+offload"):
        list(training()(net, HOST))
        if fails_at == "forward":
            net.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        elif fails_at == "backward":
            next(net.blocks[2].parameters()).register_hook(lambda *_: 1 / 0)
        list(training(steps=1)(net, HOST))


def two_handles() -> None:
    """Each streams while the other does; the one that stays trains on."""
    nets = blocks(), blocks()
    handles = [stream(net, HOST, window=1) for net in nets]
    for net in nets:
        list(training()(net, HOST))
    handles[0].close()
    list(training()(nets[1], HOST))
    handles[1].close()


class Module(models.ZooModule):
    fails_at = -1

    def training_step(self, batch: Any, index: int) -> Any:
        if index == self.fails_at:
            raise ZeroDivisionError
        return super().training_step(batch, index)


def a_fit(fails_at: int = -1, streams: bool = True) -> None:
    case = models.case("batch_norm")
    module = Module(case)
    module.fails_at = fails_at
    strategy = parity.streaming_strategy("cpu", window=1) if streams else "auto"
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", precision="bf16-mixed", max_epochs=1, **quiet)
    with contextlib.suppress(ZeroDivisionError):
        trainer.fit(module, models.loader(case, 3))


RUNS: dict[str, Callable[[], None]] = {
    "a loop": a_loop,
    "a failing forward": functools.partial(a_loop, "forward"),
    "a failing backward": functools.partial(a_loop, "backward"),
    "two handles": two_handles,
    "a fit": a_fit,
    "a failing fit": functools.partial(a_fit, fails_at=1),
}


@pytest.mark.parametrize("kind", RUNS)
def test_after_every_kind_of_run_nothing_is_left_patched(kind):
    RUNS[kind]()
    left = [patch.name for patch in patches.ALL if patch.users]
    there = [vars(patch.holder).get(patch.name, patches.ABSENT) is patch.original for patch in patches.ALL]
    assert not left and all(there) and not patches.LIST_WRITES.users


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


def counting(calls, applied):
    def apply(kind, *args, **kwargs):
        calls.append(kind.__name__)
        return applied.__get__(None, kind)(*args, **kwargs)

    return classmethod(apply)


def test_a_patch_of_the_users_over_a_patched_name_is_called_and_stays(monkeypatch):
    calls, net, x = [], blocks(), next(inputs(HOST))
    monkeypatch.setattr(torch.autograd.Function, "apply", counting(calls, vars(torch.autograd.Function)["apply"]))
    for _ in range(2):
        with stream(net, HOST, window=1):
            checkpoint(net, x.requires_grad_(), use_reentrant=True).sum().backward()
    checkpoint(net, x, use_reentrant=True)
    assert calls.count("CheckpointFunction") == 3

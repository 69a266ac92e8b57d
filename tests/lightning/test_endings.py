"""However a run ends, the module is plain again, nothing of it is on the device, and the next run works."""

import contextlib
import functools
import gc
import signal
import time

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from often import often
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import models
import parity
from sp_lightning.errors import HalfAppliedStepError
from sp_lightning.host.device import DeviceMemoryError
from sp_lightning.stream.gradients import Gradients
from sp_lightning.stream.unit import Unit

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
BOTH = pytest.mark.parametrize("accelerator", [pytest.param("cpu", marks=pytest.mark.slow), "simgpu"])
CASE = models.case("batch_norm")
SCALING = GradScaler._unscale_grads_


class Boom(Exception):
    pass


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, may_fail=lambda: True):
        ctx.may_fail = may_fail
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        deadline = time.monotonic() + 60
        while not ctx.may_fail():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        raise Boom("in backward")


class FailingStep(torch.optim.AdamW):
    """Fails before anything was written, or after everything was."""

    fail = None

    def step(self, closure=None):
        loss = closure()
        if self.fail == "before":
            raise Boom("before the step")
        super().step()
        if self.fail == "after":
            raise Boom("after the step")
        return loss


class Module(models.ZooModule):
    """Fails in its third batch, at a place that the test names."""

    def __init__(self, place=None, error=Boom):
        super().__init__(CASE)
        self.place, self.error = place, error

    def fail_at(self, place, index):
        if place == self.place and index == 2:
            raise self.error(place)

    def training_step(self, batch, index):
        self.fail_at("training_step", index)
        hooks = []
        if index == 2 and self.place == "forward":
            hooks = [self.net.blocks[2].register_forward_pre_hook(lambda *_: self.fail_at("forward", 2))]
        if index == 2 and self.place == "backward":
            hooks = [self.net.blocks[1].register_forward_hook(lambda *args: FailingBackward.apply(args[2]))]
        try:
            return super().training_step(batch, index)
        finally:
            for hook in hooks:
                hook.remove()

    def on_after_backward(self):
        self.fail_at("on_after_backward", self.trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, outputs, batch, index):
        self.fail_at("on_train_batch_end", index)

    def validation_step(self, batch, index):
        if self.place == "validation" and not self.trainer.sanity_checking:
            raise self.error("validation")
        if self.place == "sanity":
            raise self.error("sanity")
        super().validation_step(batch, index)

    def optimizer_step(self, epoch, index, optimizer, closure=None):
        if self.place in ("before", "after"):
            optimizer.optimizer.fail = self.place if index == 2 else None
        optimizer.step(closure=closure)

    def configure_optimizers(self):
        self.fail_at("configure_optimizers", 2)
        return FailingStep(self.parameters(), 1e-2, foreach=False, fused=False)


def fit(side, accelerator, module, batches=4, optimizer_overlap=True, ckpt_path=None, **options):
    strategy = parity.plain_strategy(accelerator)
    if side == "streaming":
        strategy = parity.streaming_strategy(accelerator, window=2, optimizer_overlap=optimizer_overlap)
    trainer = parity.make_trainer(strategy, accelerator, max_epochs=1, limit_val_batches=2, **options)
    loaders = models.loader(CASE, batches), models.loader(CASE, 2)
    L.seed_everything(1, verbose=False)
    before = world(module)
    try:
        trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    finally:
        if side == "streaming":
            assert world(module) == before
            assert module.device == torch.device("cpu")
    return trainer


def world(module):
    """All that streaming touches and has to put back."""
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}
    return {
        "parameters": [(name, id(parameter)) for name, parameter in module.named_parameters()],
        "forwards": [name for name, child in module.named_modules() if "forward" in vars(child)],
        "hooks": [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()],
        "step hooks": (
            len(_global_optimizer_pre_hooks),
            len(_global_optimizer_post_hooks),
        ),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "scaling": GradScaler._unscale_grads_ is SCALING,
        "attributes": [sorted(vars(child)) for child in module.net.modules()],
    }


def seeded(*args):
    L.seed_everything(0, verbose=False)
    return Module(*args)


def weights(module):
    return {name: value.detach().clone().cpu() for name, value in module.state_dict().items()}


def left_on_device(expected=None):
    """What the device holds; `expected`, if that is so within a moment: autograd's thread lets go of graphs late."""
    gc.collect()
    torch.accelerator.synchronize()
    patience = time.monotonic() + 5
    while (nbytes := torch.accelerator.memory_allocated()) != expected is not None and time.monotonic() < patience:
        time.sleep(0.001)
    return nbytes


def run_on(side, accelerator, place, error=Boom, raised=Boom):
    """A run that fails, and another one of the same module; gives the weights after each."""
    module = seeded(place, error)
    if place is None:
        fit(side, accelerator, module)
    else:
        with pytest.raises(raised):
            fit(side, accelerator, module)
    after_first, module.place = weights(module), None
    fit(side, accelerator, module)
    return after_first, weights(module)


IN_A_STEP = ["training_step", "forward", "backward", "on_after_backward", "before", "after", "on_train_batch_end"]
PLACES = [None, *IN_A_STEP, "validation", "sanity"]


@BOTH
@pytest.mark.parametrize("place", often(PLACES, "backward", "validation"))
def test_a_failure_leaves_weights_and_next_run_as_in_a_plain_run(place, accelerator):
    expected = run_on("plain", accelerator, place)
    allocated = accelerator == "simgpu" and left_on_device()
    actual = run_on("streaming", accelerator, place)
    parity.assert_same(expected[0], actual[0])
    parity.assert_same(expected[1], actual[1])
    if accelerator == "simgpu":
        assert left_on_device(allocated) == allocated


class Overlapping(models.ZooModule):
    """Overrides nothing that keeps its optimizer from stepping while backward runs."""

    def __init__(self, fails_at=2, once_stepped=False):
        super().__init__(CASE)
        self.fails_at, self.once_stepped = fails_at, once_stepped

    def on_train_batch_start(self, batch, index):
        """Keeps a step from running on into the next forward: what has arrived is stepped, however busy the host."""

    def stepped(self):
        return self.trainer.strategy.handle.stats()["stepped_ahead"]

    def training_step(self, batch, index):
        hooks = []
        if index == self.fails_at:
            before = self.stepped()

            def fail(module, args, output):
                return FailingBackward.apply(output, lambda: self.stepped() > before or not self.once_stepped)

            hooks = [self.net.blocks[0].register_forward_hook(fail)]
        try:
            return super().training_step(batch, index)
        finally:
            for hook in hooks:
                hook.remove()


@BOTH
@pytest.mark.parametrize("overlap", [True, False])
def test_a_failure_during_optimizer_steps_says_what_was_stepped(overlap, accelerator, caplog):
    """Each parameter is that of before or of after the step; without overlap all are those of before."""
    L.seed_everything(0, verbose=False)
    module = Overlapping(once_stepped=overlap)
    with pytest.raises(Boom):
        fit("streaming", accelerator, module, optimizer_overlap=overlap)
    before, after = finished_steps(accelerator)[2:4]
    stepped = [not torch.equal(before[name], parameter) for name, parameter in module.named_parameters()]
    for name, parameter in module.named_parameters():
        assert torch.equal(before[name], parameter) or torch.equal(after[name], parameter)
    said = [record.getMessage() for record in caplog.records if "already stepped" in record.getMessage()]
    assert any(stepped) is overlap
    assert len(said) == overlap
    if overlap:
        assert f"had already stepped {sum(stepped)} of {len(stepped)} parameters" in said[0]


# ---- steps that fail half done (optim/half_applied.py)


class Saving(L.Callback):
    """Saves by itself."""

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(trainer.default_root_dir + "/own.ckpt")


def half_done(accelerator, folder):
    """A run of which the fourth step failed in backward, when units were stepped, with all that saves on exception."""
    L.seed_everything(0, verbose=False)
    module = Overlapping(fails_at=3)
    saving = [
        ModelCheckpoint(folder / "kept", every_n_train_steps=2, save_last="link", save_on_exception=True),
        OnExceptionCheckpoint(folder / "exception"),
    ]
    options = {"callbacks": saving, "default_root_dir": folder, "enable_checkpointing": True}
    with pytest.raises(Boom):
        fit("streaming", accelerator, module, **options)
    module.fails_at = None
    return module, saving


@BOTH
def test_a_half_done_step_is_not_saved_over_the_last_checkpoint(accelerator, tmp_path):
    module, saving = half_done(accelerator, tmp_path)
    here = tmp_path / "kept"
    assert sorted(path.name for path in tmp_path.rglob("*.ckpt")) == ["epoch=0-step=2.ckpt", "last.ckpt"]
    assert saving[0].best_model_path == str(here / "epoch=0-step=2.ckpt")
    assert torch.load(here / "last.ckpt", weights_only=False)["global_step"] == 2
    assert module.trainer.callbacks[-2:] == saving
    with pytest.raises(HalfAppliedStepError, match=r"Boom came between a backward, .* nothing steps or saves them"):
        module.trainer.save_checkpoint(here / "later.ckpt")
    assert all(value.isfinite().all() for value in module.state_dict().values())


@BOTH
def test_a_callback_that_saves_a_half_done_step_gets_an_error(accelerator, tmp_path):
    L.seed_everything(0, verbose=False)
    module = Overlapping()
    with pytest.raises(HalfAppliedStepError, match="nothing steps or saves them") as error:
        fit("streaming", accelerator, module, callbacks=[Saving()], default_root_dir=tmp_path)
    assert isinstance(error.value.__context__, Boom) and module.trainer.strategy.handle.closed
    module.trainer._teardown()  # which Lightning leaves out where a callback raises


@BOTH
@pytest.mark.parametrize("with_state", often([True, False]))
def test_a_half_stepped_module_goes_on_only_from_a_checkpoint(accelerator, with_state, tmp_path):
    """Also with a new optimizer, since the weights are those of no step."""
    module, _ = half_done(accelerator, tmp_path)
    last = str(tmp_path / "kept" / "last.ckpt")
    with pytest.raises(HalfAppliedStepError, match="Load the last checkpoint"):
        module.trainer.optimizers[0].step()
    with pytest.raises(HalfAppliedStepError):
        fit("streaming", accelerator, module)
    if with_state:
        fit("streaming", accelerator, module, ckpt_path=last)
        plain = Overlapping(fails_at=None)
        fit("plain", accelerator, plain, ckpt_path=last)
        parity.assert_same(weights(plain), weights(module))
    else:
        module.load_state_dict(torch.load(last, weights_only=False)["state_dict"])
        module.trainer.optimizers[0].load_state_dict(module.trainer.optimizers[0].state_dict())
        fit("streaming", accelerator, module).save_checkpoint(tmp_path / "good.ckpt")


def test_without_overlap_a_step_that_failed_is_saved(tmp_path):
    module = seeded("backward")
    with pytest.raises(Boom):
        fit("streaming", "cpu", module, optimizer_overlap=False)
    module.trainer.save_checkpoint(tmp_path / "after.ckpt")


@pytest.fixture
def interrupts():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)  # Lightning ignores it for the rest of the process


@BOTH
@pytest.mark.parametrize("place", often(["backward", "forward", "on_train_batch_end"]))
def test_ctrl_c(place, accelerator, interrupts, monkeypatch):
    def interrupt(ctx, grad):
        raise KeyboardInterrupt

    def interrupted(side):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run_on(side, accelerator, place, KeyboardInterrupt, raised=SystemExit)

    monkeypatch.setattr(FailingBackward, "backward", staticmethod(interrupt))

    expected, actual = interrupted("plain"), interrupted("streaming")
    parity.assert_same(expected[0], actual[0])
    parity.assert_same(expected[1], actual[1])


# ---- what a plain run cannot fail in: the copies


def fail_once(monkeypatch, owner, name, count, error):
    """The call with that number fails."""
    original, calls = getattr(owner, name), []

    def failing(*args):
        calls.append(name)
        if len(calls) == count:
            raise error
        return original(*args)

    monkeypatch.setattr(owner, name, failing)


@functools.cache
def finished_steps(accelerator):
    """The weights after 0, 1, ... steps of the plain run."""

    class Keeping(L.Callback):
        kept = [weights(seeded())]

        def on_train_batch_end(self, trainer, module, *_):
            self.kept.append(weights(module))

    fit("plain", accelerator, seeded(), callbacks=[keeping := Keeping()])
    return keeping.kept


UP, DOWN = (Unit, "load"), (Gradients, "take")
COPIES = {f"up {count}": (UP, count) for count in (2, 8, 25, 29, 34, 37, 41)}
COPIES |= {f"down {count}": (DOWN, count) for count in (1, 9, 12)}


@parity.product(copy=list(COPIES), error=[Boom, torch.OutOfMemoryError], accelerator=["cpu", "simgpu"])
def test_a_copy_that_fails_leaves_the_weights_of_a_finished_step(copy, error, accelerator, monkeypatch):
    way, count = COPIES[copy]
    module, plain = seeded(), seeded()
    fail_once(monkeypatch, *way, count, error("no copy"))
    is_repeated = copy.startswith("up") and error is torch.OutOfMemoryError  # once other units have left the device
    with contextlib.nullcontext() if is_repeated else pytest.raises(error, match="no copy"):
        fit("streaming", accelerator, module)
    found, trained = weights(module), dict(module.named_parameters())
    matches = [all(torch.equal(step[name], found[name]) for name in trained) for step in finished_steps(accelerator)]
    assert sum(matches) == 1
    plain.load_state_dict(found)
    module.train()  # Lightning leaves a module whose validation failed as it was in there
    fit("plain", accelerator, plain)
    fit("streaming", accelerator, module)
    parity.assert_same(weights(plain), weights(module))


def test_a_backward_that_fills_the_device_says_what_makes_room(monkeypatch):
    import simgpu

    def fill(ctx, grad):
        torch.empty(simgpu.config.capacity, dtype=torch.uint8, device=grad.device)

    monkeypatch.setattr(FailingBackward, "backward", staticmethod(fill))
    with pytest.raises(DeviceMemoryError, match=r"the window of 2 took .* to make room: activations='recompute'"):
        fit("streaming", "simgpu", seeded("backward"))


@pytest.mark.parametrize("place", ["handle.Room", "handle.Visit"])
def test_a_failure_while_streaming_begins(place, monkeypatch):
    def fail(*args, **settings):
        raise Boom

    module, allocated = seeded(), left_on_device()
    monkeypatch.setattr(f"sp_lightning.{place}", fail)
    with pytest.raises(Boom):
        fit("streaming", "simgpu", module)
    assert left_on_device(allocated) == allocated
    monkeypatch.undo()
    fit("streaming", "simgpu", module)

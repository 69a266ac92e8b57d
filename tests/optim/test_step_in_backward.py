"""The optimizer steps while backward runs where that is exact, and only there; either way the bits are the plain
run's."""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import Precision
from refusals import refusal
from side_by_side import StepsAtOnce

import models
import parity
import sp_lightning
from sp_lightning.autograd.backward_pass import in_backward
from sp_lightning.errors import ExactnessError
from sp_lightning.lightning import step_timing
from sp_lightning.memory.host_copy import HostCopy
from sp_lightning.optim.pending_step import HostThread
from sp_lightning.runtime.window import Window

ROOT = Path(__file__).parents[2]


class Watched(StepsAtOnce):
    """Counts the parameters that were stepped ahead."""

    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, trainer, module, *_):
        stats = trainer.strategy.handle.stats()
        self.counts.append(stats["stepped_ahead"])


def fit(module, callbacks=(), options=None, kind=sp_lightning.SuperpipelineStrategy, **trainer):
    watched = Watched()
    strategy = kind(window=2, **(options or {}))
    arguments = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        callbacks=[watched, *callbacks],
        enable_model_summary=False,
        **arguments,
        **trainer,
    )
    trainer.fit(module, models.loader(module.case, 4))
    return watched.counts


def module_of(name="mlp", optimizer="adamw", kind=models.ZooModule):
    torch.manual_seed(0)
    return kind(models.case(name), optimizer=optimizer)


@pytest.mark.simgpu
@parity.product(
    optimizer=["sgd", "adamw"],
    overlap=[True, False],
    name=["mlp", "tied_embedding", "shared_block", "checkpoint_reentrant", "frozen_prefix", "t5"],
)
@pytest.mark.few(1)
def test_the_bits_are_the_plain_runs(name, overlap, optimizer):
    options = {"window": 2, "optimizer_overlap": overlap}
    parity.check(models.case(name), options, accelerator="simgpu", optimizer=optimizer, accumulate=2, epochs=2)


class Adapted(models.Block):
    """A frozen layer beside a trained one, whose gradients are complete before the frozen one is needed."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(models.WIDTH, models.WIDTH, bias=False).requires_grad_(False)
        self.adapter = torch.nn.Linear(models.WIDTH, models.WIDTH, bias=False)
        for part in (self.norm, self.up, self.down):
            part.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


class Detached(torch.nn.Linear):
    """Needs its weight after its gradient is complete, if what comes from below is trained."""

    def __init__(self):
        super().__init__(models.WIDTH, models.WIDTH, bias=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.detach()) + torch.nn.functional.linear(x.detach(), self.weight)


class Thawing(models.Stack):
    """All but its last block begins to train in a later step."""

    steps = 0

    def __init__(self, last):
        super().__init__([models.Block().requires_grad_(False), models.Block().requires_grad_(False), last()])
        self.stem.requires_grad_(False)

    def run(self, x):
        self.steps += self.training
        if self.steps > 2:
            self.blocks[:2].requires_grad_()
        return super().run(x)


class Deepening(models.Stack):
    """Trained from its last block on, in later steps from one before that."""

    steps = 0

    def __init__(self):
        super().__init__(Adapted() for _ in range(4))

    def run(self, x):
        self.steps += self.training
        for number, block in enumerate(self.blocks):
            x = block(x.detach() if number == (3 if self.steps <= 2 else 1) else x)
        return x


WAYS = {
    "adapted": models.stack_of(Adapted),
    "thawing below an adapter": functools.partial(Thawing, Adapted),
    "thawing below a detached use": functools.partial(Thawing, Detached),
    "detached deeper down": Deepening,
}


@parity.product(way=list(WAYS), precision=["32-true", "bf16-mixed"], device=parity.DEVICES)
@pytest.mark.few(1)
def test_what_backward_needs_after_gradients_may_become_something_else(device, way, precision):
    case = dataclasses.replace(models.case("mlp"), make=WAYS[way])
    parity.check(case, {"window": 1}, accelerator=device.type, batches=6, precision=precision)


class LatePenalty(models.Stack):
    """Begins to ask for a weight beside its layer."""

    steps = 0

    def __init__(self, when):
        super().__init__(models.Block() for _ in range(3))
        self.when = when

    def run(self, x):
        self.steps += self.training
        weight = self.blocks[1].up.weight
        before, after = ((self.steps > 2 and self.when == when) for when in ("before", "after"))
        x = super().run(x + weight.square().mean() if before else x)
        return x + weight.square().mean() if after else x


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.few(1)
def test_a_late_read_beside_a_layer_is_refused_for_what_it_is_also_where_units_are_stepped(device, when):
    case = dataclasses.replace(models.case("mlp"), make=functools.partial(LatePenalty, when))
    with pytest.raises(ExactnessError, match=r'through its layer, and also through another read.*wire_dtype="as-is"'):
        parity.check(case, {"window": 1}, accelerator=device.type, batches=4, precision="bf16-mixed")
    parity.check(case, {"window": 1, "wire_dtype": "as-is"}, accelerator=device.type, batches=4, precision="bf16-mixed")


def test_every_parameter_with_a_gradient_is_stepped_ahead():
    module = module_of()
    counts = fit(module)  # the first step has to show in which order gradients become complete
    assert counts == [len(list(module.parameters())) * step for step in (0, 1, 2, 3)]


def test_with_accumulation_only_the_last_micro_batch_steps():
    module = module_of()
    parameters = len(list(module.parameters()))
    assert fit(module, accumulate_grad_batches=2) == [0, 0, 0, parameters]


class LooksAtGradients(models.ZooModule):
    def on_after_backward(self):
        self.norms = [p.grad.norm() for p in self.parameters()]


class ChangesGradients(models.ZooModule):
    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.mul_(0.5)


class ClipsItself(models.ZooModule):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_value_(self.parameters(), 1e-3)


class StepsItself(models.ZooModule):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class BackwardItself(models.ZooModule):
    def backward(self, loss):
        (loss * 2).backward()


class SeesGradients(L.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        assert all(p.grad is not None for p in module.parameters())


class WrapsItsHook(models.ZooModule):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        own = functools.wraps(self.on_after_backward)
        self.on_after_backward = own(lambda: list(map(torch.sum, self.parameters())))


class Looks:
    """Whatever can be called may be a hook."""

    def __call__(self, trainer, module):
        assert all(p.grad is not None for p in module.parameters())


class ClipsInTheStep(models.ZooModule):
    """After the backward that it runs by itself."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        step = optimizer.step

        def clipped(closure):
            loss = closure()
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-3)
            step()
            return loss

        optimizer.step = clipped
        return optimizer


class DoublesGradients:
    """A part of the Trainer that does more between backward and step than Lightning's own."""

    def post_backward(self, closure_loss, module=None):
        for parameter in (module or self.lightning_module).parameters():
            parameter.grad = parameter.grad * 2
        return super().post_backward(*(arg for arg in (closure_loss, module) if arg is not None))


class Doubling(DoublesGradients, sp_lightning.SuperpipelineStrategy):
    pass


class DoublingPrecision(DoublesGradients, Precision):
    pass


class HookedOptimizer(models.ZooModule):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer


@pytest.mark.parametrize(
    "kind, callbacks, trainer, reason",
    [
        (LooksAtGradients, [], {}, "overrides on_after_backward"),
        (ChangesGradients, [], {}, "overrides on_before_optimizer_step"),
        (ClipsItself, [], {}, "overrides configure_gradient_clipping"),
        (StepsItself, [], {}, "overrides optimizer_step"),
        (BackwardItself, [], {}, "overrides backward"),
        (ClipsInTheStep, [], {}, "the optimizer's step method was replaced"),
        (HookedOptimizer, [], {}, "other step hooks are registered"),
        (WrapsItsHook, [], {}, "overrides on_after_backward"),
        (models.ZooModule, [LambdaCallback(on_after_backward=Looks())], {}, "LambdaCallback overrides"),
        (models.ZooModule, [SeesGradients()], {}, "SeesGradients overrides on_before_optimizer_step"),
        (models.ZooModule, [], {"gradient_clip_val": 0.5}, "gradients are clipped"),
        (models.ZooModule, [], {"kind": Doubling}, "Doubling overrides post_backward"),
        (models.ZooModule, [], {"plugins": [DoublingPrecision()]}, "DoublingPrecision overrides post_backward"),
    ],
)
@pytest.mark.few(3)
def test_what_looks_between_backward_and_step_holds_the_step_and_is_said_once(kind, callbacks, trainer, reason, caplog):
    with caplog.at_level(logging.INFO, "sp_lightning"):
        assert fit(module_of(kind=kind), callbacks, **trainer) == [0, 0, 0, 0]
    assert sum(reason in record.getMessage() for record in caplog.records) == 1


class Interrupted(models.ZooModule):
    """In the third batch a signal comes near the end of backward, when units above are stepped."""

    def training_step(self, batch, number):
        if number == 2:
            self.before = {name: value.detach().cpu().clone() for name, value in self.state_dict().items()}
            send = lambda *_: os.kill(os.getpid(), signal.SIGUSR1)  # noqa: E731
            self.net.blocks[0].register_forward_hook(lambda module, args, out: out.register_hook(send) and None)
        return super().training_step(batch, number)


@pytest.fixture
def interrupted(device, monkeypatch, tmp_path):
    """A module and a trainer on a device whose backward runs in another thread, if there is one."""
    if device.type == "simgpu":
        import simgpu.lightning  # noqa: F401
    handler = signal.getsignal(signal.SIGUSR1)
    monkeypatch.chdir(tmp_path)

    def make():
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        module = module_of(kind=Interrupted)
        return module, L.Trainer(accelerator=device.type, devices=1, strategy="superpipeline", max_steps=3, **quiet)

    yield make
    signal.signal(signal.SIGUSR1, handler)


def test_a_signal_handler_that_saves_when_units_were_stepped_is_an_error(interrupted, tmp_path):
    module, trainer = interrupted()
    signal.signal(signal.SIGUSR1, lambda *_: trainer.save_checkpoint(tmp_path / "mixed.ckpt"))
    with pytest.raises(ExactnessError, match="asked for in the middle of a step"):
        trainer.fit(module, models.loader(module.case, 4))
    assert not (tmp_path / "mixed.ckpt").exists()


def test_what_slurms_signal_saves_is_of_one_step(interrupted, tmp_path, monkeypatch):
    job = dict.fromkeys(["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"], "0")
    job |= dict.fromkeys(["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE"], "1")
    for name, value in {**job, "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", lambda *_, **__: 0)
    module, trainer = interrupted()
    trainer.fit(module, models.loader(module.case, 4))
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert {float(state["step"]) for state in saved["optimizer_states"][0]["state"].values()} == {2.0}
    for name, value in saved["state_dict"].items():
        assert torch.equal(value.cpu(), module.before[name]), name


class SeesTheEnd(models.ZooModule):
    """Notes what was stepped, in a hook that nothing is said about."""

    def on_train_end(self):
        self.stepped = self.trainer.strategy.handle.stats()["stepped_ahead"]
        self.said = self.trainer.strategy.handle.steps.said


@pytest.mark.filterwarnings("ignore")  # about Lightning's default logger
@pytest.mark.parametrize("package", ["sp_lightning", "sp_lightning.in_a_package"])
@pytest.mark.few(1)
def test_with_default_options_nothing_of_ours_or_lightnings_holds_the_step(package, device, monkeypatch):
    """Wherever our files lie."""
    for kind in (sp_lightning.SuperpipelineStrategy, sp_lightning.SuperpipelineCallback):
        monkeypatch.setattr(kind, "__module__", f"{package}.module")
    monkeypatch.setattr(step_timing, "__package__", package)
    if device.type == "simgpu":
        import simgpu.lightning  # noqa: F401
    module = module_of(kind=SeesTheEnd)
    trainer = L.Trainer(accelerator=device.type, devices=1, strategy="superpipeline", max_epochs=1)
    trainer.fit(module, models.loader(module.case, 4))
    assert not any(module.said.values())
    assert module.stepped >= len(list(module.parameters()))  # those of the last step at least, as none comes after it


def test_a_parameter_with_a_hook_takes_its_step_in_the_optimizers_own():
    module = module_of()
    seen = []
    next(module.parameters()).register_hook(lambda grad: seen.append(grad.shape))
    assert fit(module)[1] == len(list(module.parameters())) - 1 and len(seen) == 4


@pytest.mark.parametrize("optimizer", ["adafactor", "two"])
def test_an_optimizer_that_is_not_elementwise_or_not_alone_does_not_overlap(optimizer):
    assert fit(module_of(optimizer=optimizer)) == [0, 0, 0, 0]


class Averaging(models.ZooModule):
    """Whose optimizer makes tensors of the default type in every step."""

    def configure_optimizers(self):
        return torch.optim.ASGD(self.parameters(), lr=self.lr, t0=2, foreach=False)


@pytest.mark.parametrize("clip", [None, ("norm", 0.5)])
@pytest.mark.few(1)
def test_an_optimizer_whose_step_depends_on_the_default_type_is_not_stepped_beside_what_sets_it(clip):
    make, options = functools.partial(Averaging, models.case("mlp")), {"precision": "bf16-true", "batches": 12}
    plainly = parity.record(make, parity.plain_strategy("cpu"), clip=clip, **options)
    streamed = parity.record(make, parity.streaming_strategy("cpu", window=2), clip=clip, **options)
    parity.compare(plainly, streamed)
    assert streamed.telemetry["stepped_ahead"] == streamed.telemetry["held_steps"] == 0


class Wrapper(torch.optim.Optimizer):
    """Has all of another one's, and none of its own."""

    def __init__(self, wrapped):
        self.wrapped, self.defaults = wrapped, wrapped.defaults

    state = property(lambda self: self.wrapped.state)
    param_groups = property(lambda self: self.wrapped.param_groups)

    def step(self, closure=None):
        return self.wrapped.step(closure)

    def zero_grad(self, set_to_none=True):
        self.wrapped.zero_grad(set_to_none)

    def state_dict(self):
        return self.wrapped.state_dict()


class Wrapping(models.ZooModule):
    def configure_optimizers(self):
        return Wrapper(super().configure_optimizers())


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.few(1)
def test_an_optimizer_that_wraps_another_and_is_not_constructed_as_one_steps_as_in_a_plain_run(place, device):
    def run(strategy):
        make = functools.partial(Wrapping, models.case("mlp"))
        return parity.record(make, strategy, accelerator=device.type)

    options = {"disk": os.getcwd(), "host_budget": "0B"} if place == "disk" else {}
    streamed = run(parity.streaming_strategy(device.type, window=1, **options))
    parity.compare(run(parity.plain_strategy(device.type)), streamed)
    assert bool(streamed.telemetry["disk_written"]) is (place == "disk")


def test_switched_off_it_is_off():
    assert fit(module_of(), options={"optimizer_overlap": False}) == [0, 0, 0, 0]


class FailsInBackward(torch.autograd.Function):
    """In the third batch: from the second on units are stepped ahead."""

    batches = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        FailsInBackward.batches += 1
        if FailsInBackward.batches == 3:
            raise ValueError("backward failed")
        return grad


def test_a_backward_that_fails_when_units_were_stepped_says_so(caplog):
    module = module_of()
    block = module.net.blocks[0]
    block.register_forward_pre_hook(lambda _, args: (FailsInBackward.apply(args[0]), *args[1:]))
    with pytest.raises(ValueError, match="backward failed"):
        fit(module)
    assert any("had already stepped" in record.getMessage() for record in caplog.records)
    assert all(type(p) is torch.nn.Parameter for p in module.parameters())


def test_optimizer_state_is_in_the_order_of_the_parameters():
    module = module_of()
    order = []

    class Order(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            (optimizer,) = trainer.optimizers
            order.append([id(p) for p in optimizer.state])

    fit(module, [Order()])
    assert order[0] == [id(p) for p in module.parameters()]


class Late(models.Block):
    """Uses one of its layers from its third step on."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.late = torch.nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x):
        self.steps += self.training
        x = super().forward(x)
        return self.late(x) if self.steps > 2 else x


def test_optimizer_state_is_made_by_who_calls_the_step(monkeypatch):
    adam = sys.modules["torch.optim.adam"]
    made, threads = adam._get_scalar_dtype, []

    def see(*args, **kwargs):
        threads.append(threading.current_thread())
        return made(*args, **kwargs)

    monkeypatch.setattr(adam, "_get_scalar_dtype", see)
    module = models.ZooModule(dataclasses.replace(models.case("mlp"), make=models.stack_of(Late)))
    assert fit(module)[-1] > 0
    assert threads == [threading.main_thread()] * len(list(module.parameters()))


@pytest.mark.slow
@pytest.mark.simgpu
def test_a_step_takes_little_more_than_its_best_time_and_a_waiting_one_much_more():
    """Loose, as timings are, and one of three: what else the machine does only ever adds to the former.
    benchmarks/overlap.py prints the figures."""
    script = [sys.executable, str(ROOT / "benchmarks" / "overlap.py"), "--steps", "5", "--json", "times.json"]
    for _ in range(3):
        subprocess.run(script, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
        times = json.loads(Path("times.json").read_text())
        if times["overlapped_ms"] <= 1.35 * times["best_ms"] and times["serial_ms"] >= 1.5 * times["overlapped_ms"]:
            return
    pytest.fail(f"none of three was near its best: {times}")


def test_the_host_thread_computes_as_its_caller_does():
    thread, seen = HostThread(), []
    tiny, count = torch.tensor(1e-38), torch.get_num_threads()

    def see():
        seen.append(((tiny * 0.1).item() == 0, torch.get_num_threads()))

    thread.submit(see).result()
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor flushes nothing")
        torch.set_num_threads(count + 1)
        thread.submit(see).result()
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(count)
    thread.submit(see).result()
    thread.close()
    assert seen == [(False, count), (True, count + 1), (False, count)]


class Tiny(models.ZooModule):
    """Has gradients whose squares are denormal numbers."""

    def training_step(self, batch, number):
        return super().training_step(batch, number) * 1e-18

    def make_optimizer(self, name, parameters):
        return torch.optim.Adam(parameters, lr=1e-2, eps=1e-24, foreach=False)


class Flushes(Tiny):
    """Flushes denormal numbers to zero from the forward to the end of a training step, in the last ones."""

    def training_step(self, batch, number):
        torch.set_flush_denormal(number >= 2)
        return super().training_step(batch, number)

    def on_train_batch_end(self, *_):
        torch.set_flush_denormal(False)


@pytest.fixture
def flush():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    torch.set_flush_denormal(False)
    yield torch.set_flush_denormal
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("kind", [Tiny, Flushes])
def test_units_are_stepped_with_the_settings_of_the_thread_that_calls_the_step(kind, flush, device):
    x = torch.ones(2, device=device, requires_grad=True)
    (x * 2).sum().backward()  # autograd's thread of the device begins with the settings of this one
    make, kept = functools.partial(kind, models.case("mlp")), {"accelerator": device.type}
    flush(kind is Tiny)
    plain = parity.HostOptimizerStrategy(device=device)  # the simulated device has threads of its own
    plainly = parity.record(make, plain, **kept)
    flush(kind is Tiny)
    streamed = parity.record(make, parity.streaming_strategy(device.type, window=1), callbacks=[StepsAtOnce()], **kept)
    parity.compare(plainly, streamed)
    assert streamed.telemetry["stepped_ahead"] > 0


@refusal(
    "a hook in backward changes whether denormal numbers are flushed to zero, or the number of threads, when units "
    "were stepped already",
    ExactnessError,
    "`optimizer_overlap=False`",
)
def test_settings_that_backward_changes_when_units_were_stepped_are_an_error(flush):
    module = module_of()

    def change(_):
        flush(module.trainer.global_step == 3)

    module.net.head.weight.register_hook(change)
    with pytest.raises(ExactnessError, match=r"set_flush_denormal or torch\.set_num_threads was called between"):
        fit(module)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_beside_a_cpu_that_computes_with_several_threads_nothing_is_stepped(clip, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    module = module_of()
    assert fit(module, gradient_clip_val=clip) == [0] * 4
    assert module.trainer.strategy.handle.stats()["held_steps"] == 0


class Regroups(models.ZooModule):
    """In its last step, a block leaves its group, for another one or for none."""

    into = None

    def configure_optimizers(self):
        stem, *rest = self.parameters()
        return torch.optim.SGD([{"params": rest}, {"params": [stem], "lr": 1e-3}], lr=0.1, foreach=False)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.regroup()
        return super().training_step(batch, batch_idx)

    def regroup(self):
        groups, leaving = self.trainer.optimizers[0].param_groups, set(self.net.blocks[1].parameters())
        groups[0]["params"] = [p for p in groups[0]["params"] if p not in leaving]
        if self.into is not None:
            groups[self.into]["params"] = [*groups[self.into]["params"], *leaving]


@pytest.mark.parametrize("into", [None, 1])
@pytest.mark.few(1)
def test_groups_are_those_that_the_training_step_left(into):
    modules = [module_of(kind=type("", (Regroups,), {"into": into})) for _ in range(2)]
    counts = fit(modules[0])
    stepped = len(list(modules[0].parameters())) - (len(modules[0].net.blocks[1].state_dict()) if into is None else 0)
    assert counts[3] - counts[2] == stepped
    assert fit(modules[1], options={"optimizer_overlap": False})[3] == 0
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(one, other)


class Auxiliary(models.ZooModule):
    """From a batch on runs a backward of another loss before that of the training step's, in a hook of its own."""

    def __init__(self, hook, since, *args, **options):
        super().__init__(*args, **options)
        self.since = since
        setattr(self, hook, self.run)

    def training_step(self, batch, number):
        self.step, self.other = number, super().training_step(batch, number)
        return self.other

    def run(self, *_):
        if self.step >= self.since:
            (self.other * 0.5).backward(retain_graph=True)


def compare_auxiliary(hook, since, device, precision="32-true", **options):
    make = functools.partial(Auxiliary, hook, since, models.case("mlp"))
    kept = {"accelerator": device.type, "precision": precision}
    plainly = parity.record(make, parity.plain_strategy(device.type), **kept)
    streamed = parity.record(make, parity.streaming_strategy(device.type, window=1, **options), **kept)
    parity.compare(plainly, streamed)
    return streamed.telemetry


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("hook", ["on_before_backward", "on_before_zero_grad"])
@pytest.mark.few(2)
def test_a_step_with_the_gradients_of_two_backwards_is_after_both(hook, precision, device, caplog):
    with caplog.at_level(logging.INFO, "sp_lightning"):
        assert compare_auxiliary(hook, 0, device, precision)["stepped_ahead"] == 0
    assert "the optimizer steps after backward, as code runs another backward" in caplog.text


@pytest.mark.parametrize("overlap", [True, False])
@refusal(
    "a hook begins to run another backward before the optimizer's step when units were stepped already",
    ExactnessError,
    "`optimizer_overlap=False`",
)
def test_a_second_backward_that_begins_when_units_were_stepped_is_an_error(overlap, device):
    expected = pytest.raises(ExactnessError, match="ran another backward after the optimizer had stepped")
    with expected if overlap else contextlib.nullcontext():
        compare_auxiliary("on_before_backward", 2, device, "bf16-mixed", optimizer_overlap=overlap)


@refusal(
    "a hook in backward changes options of the optimizer, or which parameters its groups have",
    ExactnessError,
    "`optimizer_overlap=False`",
)
def test_groups_that_backward_changes_when_units_were_stepped_are_an_error():
    module = module_of(kind=Regroups)
    module.regroup = lambda: module.net.head.weight.register_hook(lambda _: Regroups.regroup(module))
    with pytest.raises(ExactnessError, match="options were changed in backward"):
        fit(module)


class Conditioned(models.ZooModule):
    """Runs its blocks twice in the third step, one of them not: the last step is expected to be like it."""

    def training_step(self, batch, batch_idx):
        net, x = self.net, self.net.stem(batch[0])
        if batch_idx == 2:
            with torch.no_grad():
                hint = functools.reduce(lambda x, block: block(x), net.blocks, x)
            x = x + hint
        for index, block in enumerate(net.blocks):
            if (batch_idx, index) != (2, 2):
                x = block(x)
        return net.head(x).square().mean()


def test_what_is_being_stepped_is_not_fetched_ahead(monkeypatch):
    fetched = []
    load = HostCopy.load

    def watched(store):
        gradient_return = store.owner.gradient_return
        if (
            in_backward()
            and store.owner.step_owner.takes_units is not None
            and not gradient_return.taken.keys().isdisjoint(map(id, store.params))
        ):
            fetched.append(store.unit.name)
        load(store)

    monkeypatch.setattr(HostCopy, "load", watched)
    counts = fit(module_of(kind=Conditioned))
    assert counts[3] > counts[2] and fetched == []


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_forward_fetches_what_was_stepped_before_its_visit(overlap, monkeypatch):
    """All blocks but the first, in each step; the first step records their order."""
    fetched = []
    load = Window._load

    def watched(self, unit, visited):
        if not in_backward() and unit is not visited and self.units[0].store.owner.phases.in_scope:
            fetched.append(unit.name)
        load(self, unit, visited)

    monkeypatch.setattr(Window, "_load", watched)
    module = module_of()
    counts = fit(module, options={"optimizer_overlap": overlap})
    assert bool(counts[3] > counts[2]) is overlap
    assert fetched == [f"net.blocks.{index}" for index in range(1, len(module.net.blocks))] * 3

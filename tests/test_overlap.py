"""The optimizer steps while backward runs where that is exact, and only there; either way the bits are the plain
run's."""

import copy
import json
import logging
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import lightning as L
import pytest
import torch

import models
import parity
import sp_lightning

ROOT = Path(__file__).parent.parent


class Watched(L.Callback):
    """Counts the parameters that were stepped ahead."""

    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, trainer, module, *_):
        stats = trainer.strategy.handle.stats()
        self.counts.append(stats["stepped_ahead"])
        self.held = stats["held_steps"]


def fit(module, callbacks=(), options=None, **trainer):
    watched = Watched()
    strategy = sp_lightning.SuperpipelineStrategy(window=2, **(options or {}))
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
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "name", ["mlp", "tied_embedding", "shared_block", "checkpoint_reentrant", "frozen_prefix", "t5"]
)
def test_the_bits_are_the_plain_runs(name, overlap, optimizer):
    options = {"window": 2, "optimizer_overlap": overlap}
    parity.check(models.case(name), options, accelerator="simgpu", optimizer=optimizer, accumulate=2, epochs=2)


def test_every_parameter_with_a_gradient_is_stepped_ahead():
    module = module_of()
    counts = fit(module)  # the first step has to show in which order gradients become complete
    assert counts == [len(list(module.parameters())) * step for step in (0, 1, 2, 3)]


def test_with_accumulation_only_the_last_micro_batch_steps():
    module = module_of()
    parameters = len(list(module.parameters()))
    assert fit(module, accumulate_grad_batches=2) == [0, parameters, parameters, 2 * parameters]


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
        (HookedOptimizer, [], {}, "step hooks beside ours"),
        (models.ZooModule, [SeesGradients()], {}, "SeesGradients overrides on_before_optimizer_step"),
        (models.ZooModule, [], {"gradient_clip_val": 0.5}, "gradients are clipped"),
    ],
)
def test_what_looks_between_backward_and_step_holds_the_step_and_is_said_once(kind, callbacks, trainer, reason, caplog):
    with caplog.at_level(logging.INFO, "sp_lightning"):
        assert fit(module_of(kind=kind), callbacks, **trainer) == [0, 0, 0, 0]
    assert sum(reason in record.getMessage() for record in caplog.records) == 1


@pytest.mark.simgpu
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ["mlp", "tied_embedding", "shared_block", "skipped_block", "rescaled_data", "lstm"])
def test_a_held_step_gives_the_plain_runs_bits(name, optimizer, precision):
    clipped = {"clip": ("norm", 0.1), "epochs": 2, "precision": precision}
    told = parity.check(models.case(name), {"window": 2}, accelerator="simgpu", optimizer=optimizer, **clipped)
    assert told["held_steps"] > 0


class Looks(L.Callback):
    """Looks at what a step leaves, in one way, right after it."""

    def __init__(self, look):
        self.look = look
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        value = self.look(trainer, module)
        self.seen.append([torch.as_tensor(item).detach().clone() for item in value])


def state_of(trainer, module):
    (optimizer,) = trainer.optimizers
    return [value for p in module.parameters() for value in optimizer.state[p].values()]


LOOKS = {
    "norm": lambda _, module: [p.norm() for p in module.parameters()],
    "detach": lambda _, module: [p.detach() for p in module.parameters()],
    "data": lambda _, module: [p.data for p in module.parameters()],
    "grad": lambda _, module: [p.grad for p in module.parameters()],
    "state_dict": lambda _, module: list(module.state_dict().values()),
    "numpy": lambda _, module: [torch.from_numpy(p.detach().numpy()) for p in module.parameters()],
    "deepcopy": lambda _, module: list(copy.deepcopy(module).parameters()),
    "vector": lambda _, module: [torch.nn.utils.parameters_to_vector(module.parameters())],
    "state": state_of,
    "optimizer.state_dict": lambda trainer, _: [
        value for entry in trainer.optimizers[0].state_dict()["state"].values() for value in entry.values()
    ],
    "checkpoint": lambda trainer, _: list(trainer._checkpoint_connector.dump_checkpoint()["state_dict"].values()),
    "storage": lambda _, module: [torch.tensor(p.untyped_storage().tolist()) for p in module.parameters()],
}


@pytest.mark.parametrize("way", LOOKS)
def test_who_looks_at_what_a_held_step_writes_sees_it_written(way, monkeypatch):
    plain_sgd = import_module("torch.optim.sgd").sgd

    def slow(*args, **kwargs):
        time.sleep(0.01)
        plain_sgd(*args, **kwargs)

    def run(strategy):
        looks = Looks(LOOKS[way])
        module = module_of(optimizer="sgd")
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            accelerator="cpu", strategy=strategy, max_epochs=1, gradient_clip_val=0.1, callbacks=[looks], **quiet
        )
        trainer.fit(module, models.loader(module.case, 3))
        return looks.seen

    expected = run("auto")
    monkeypatch.setattr(import_module("torch.optim.sgd"), "sgd", slow)
    seen = run(sp_lightning.SuperpipelineStrategy(window=2))
    for then, now in zip(expected, seen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(then, now, strict=True))


def test_a_view_that_somebody_keeps_is_never_behind():
    """Another tensor over a weight's bytes can be looked at without anybody noticing: such a weight does not wait."""

    class Keeps(models.ZooModule):
        def on_train_start(self):
            self.view = self.net.head.weight.detach()
            self.sums = []

        def training_step(self, batch, index):
            self.sums.append(self.view.sum().item())
            return super().training_step(batch, index)

    def sums(strategy):
        module = module_of(kind=Keeps)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, gradient_clip_val=0.1, **quiet)
        trainer.fit(module, models.loader(module.case, 4))
        return module.sums

    assert sums("auto") == sums(sp_lightning.SuperpipelineStrategy(window=2))


def test_an_error_of_a_held_step_is_raised(monkeypatch):
    def fails(*_, **__):
        raise ValueError("the optimizer failed")

    monkeypatch.setattr(import_module("torch.optim.sgd"), "sgd", fails)
    with pytest.raises(ValueError, match="the optimizer failed"):
        fit(module_of(optimizer="sgd"), gradient_clip_val=0.5)


def test_a_parameter_with_a_hook_takes_its_step_in_the_optimizers_own():
    module = module_of()
    seen = []
    next(module.parameters()).register_hook(lambda grad: seen.append(grad.shape))
    assert fit(module)[1] == len(list(module.parameters())) - 1 and len(seen) == 4


@pytest.mark.parametrize("optimizer", ["adafactor", "two"])
def test_an_optimizer_that_is_not_elementwise_or_not_alone_does_not_overlap(optimizer):
    assert fit(module_of(optimizer=optimizer)) == [0, 0, 0, 0]


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


@pytest.mark.simgpu
def test_a_step_takes_little_more_than_its_best_time_and_a_waiting_one_much_more():
    """Loose, as timings are: benchmarks/overlap.py prints the figures."""
    script = [sys.executable, str(ROOT / "benchmarks" / "overlap.py"), "--steps", "5", "--json", "times.json"]
    subprocess.run(script, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    times = json.loads(Path("times.json").read_text())
    assert times["overlapped_ms"] <= 1.35 * times["best_ms"]
    assert times["clipped_ms"] <= 1.6 * times["best_ms"]
    assert times["serial_ms"] >= 1.5 * times["overlapped_ms"]

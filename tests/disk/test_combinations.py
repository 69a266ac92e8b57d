"""Features that meet state and weights on a disk in one run are plain Lightning, bit for bit."""

import functools
import importlib
import os

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn

import models
import parity
from sp_lightning.disk import state_ring
from sp_lightning.disk.scratch_file import in_memory_nbytes


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 16)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 16)


def groups(module):
    """Two groups, of which one decays its weights and the other has another rate."""
    weights = [p for p in module.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in module.parameters() if p.requires_grad and p.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]


OPTIMIZERS = {
    "groups": lambda m: torch.optim.AdamW(groups(m), lr=1e-2, foreach=False),
    "amsgrad, maximize": lambda m: torch.optim.Adam(groups(m), amsgrad=True, maximize=True, foreach=False),
    "a group that maximizes": lambda m: torch.optim.AdamW(
        [{**group, "maximize": not number} for number, group in enumerate(groups(m))], foreach=False
    ),
    "a group with foreach": lambda m: torch.optim.AdamW(
        [{**group, "foreach": bool(number)} for number, group in enumerate(groups(m))]
    ),
    "a group without momentum": lambda m: torch.optim.SGD(
        [{**group, "momentum": 0.9 * number} for number, group in enumerate(groups(m))], lr=1e-2, foreach=False
    ),
    "a rate that is a tensor": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2), foreach=False),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), foreach=False),
    "adafactor": lambda m: torch.optim.Adafactor(groups(m), lr=1e-2, foreach=False),
    "nadam": lambda m: torch.optim.NAdam(groups(m), lr=1e-3, foreach=False),
}


class Editing(L.Callback):
    """User code that reads and writes state, weights and options between steps."""

    def on_train_batch_start(self, trainer, module, batch, number):
        optimizer = trainer.optimizers[0]
        if number == 2:
            for entry in optimizer.state.values():
                for value in entry.values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        value.mul_(0.5)
            with torch.no_grad():
                next(iter(module.parameters())).add_(0.01)
        if number == 3:
            first = next(iter(optimizer.state))
            optimizer.state[first] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in optimizer.state[first].items()
            }
            last = list(optimizer.state)[-1]
            del optimizer.state[last]
        if number == 4:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5


class Freezing(L.Callback):
    """User code that freezes weights for a while."""

    def on_train_batch_start(self, trainer, module, batch, number):
        if number in (1, 3):
            list(module.parameters())[1].requires_grad_(number == 3)
            list(module.parameters())[-2].requires_grad_(number == 3)


CALLBACKS = {
    "none": list,
    "editing": lambda: [Editing()],
    "freezing": lambda: [Freezing()],
    "average": lambda: [EMAWeightAveraging(decay=0.8)],
    "swa": lambda: [StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)],
}


class Combined(models.ZooModule):
    """A case with an optimizer, a schedule and what becomes of gradients."""

    def __init__(self, case, kind, schedule):
        super().__init__(case)
        self.kind, self.schedule = kind, schedule

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.kind](self)
        if not self.schedule:
            return optimizer
        schedulers = {
            "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7),
            "cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40, cycle_momentum=False),
        }
        return [optimizer], [{"scheduler": schedulers[self.schedule](), "interval": "step"}]


def cells():
    axes = {
        "case": ["mlp", "tied_embedding", "transformer_encoder"],
        "kind": list(OPTIMIZERS),
        "schedule": [None, "step", "cycle"],
        "callbacks": list(CALLBACKS),
        "precision": ["32-true", "bf16-mixed", "bf16-true", "16-mixed"],
        "accumulate": [1, 2],
        "clip": [None, ("norm", 0.3), ("value", 0.01)],
        "accelerator": ["cpu", "simgpu"],
        "overlap": [True, False],
        "disk_masters": [False, True],
    }
    often = parity.each_value(**axes)
    rows = often + [row for row in parity.pairwise(**axes) if row not in often]
    for number, row in enumerate(rows):
        if row["precision"] == "16-mixed":
            row["accelerator"] = "simgpu"
        yield pytest.param(
            row,
            id="-".join(map(str, row.values())),
            marks=[pytest.mark.simgpu] * (row["accelerator"] == "simgpu") + [pytest.mark.slow] * (number >= len(often)),
        )


@pytest.mark.parametrize("cell", list(cells()))
@pytest.mark.few(4)
def test_features_together(cell):
    case = models.case(cell["case"])
    if case.name == "transformer_encoder" and "-mixed" in cell["precision"] and cell["accelerator"] != "cpu":
        pytest.skip("some versions of torch fail plainly")

    def run(strategy):
        return parity.record(
            functools.partial(Combined, case, cell["kind"], cell["schedule"]),
            strategy,
            accelerator=cell["accelerator"],
            precision=cell["precision"],
            accumulate=cell["accumulate"],
            clip=cell["clip"],
            batches=6,
            epochs=2,
            callbacks=CALLBACKS[cell["callbacks"]](),
        )

    masters = {"master_weights": True} if cell["disk_masters"] and cell["precision"] == "bf16-true" else {}
    if masters:
        plain = parity.streaming_strategy(cell["accelerator"], **masters)
    else:
        plain = parity.plain_strategy(cell["accelerator"])
    expected = run(plain)
    options = {"host_budget": "0B", "disk": os.getcwd(), "optimizer_overlap": cell["overlap"], **masters}
    parity.compare(expected, run(parity.streaming_strategy(cell["accelerator"], **options)))


@parity.product(precision=["32-true", "bf16-mixed"], optimizer=["groups", "adafactor"], device=parity.DEVICES)
@pytest.mark.seldom
def test_several_runs_of_one_module(precision, optimizer, device):
    """Fits, validations and predictions, of which one is plain: weights live on in one file after another."""
    case = models.case("mlp")

    def trainer(strategy):
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
        return L.Trainer(
            strategy=strategy,
            accelerator=device.type,
            precision=precision,
            enable_checkpointing=False,
            **options,
        )

    def run(streams):
        L.seed_everything(0, verbose=False)
        module, seen = Combined(case, optimizer, "step"), []
        options = {"host_budget": "0B", "disk": os.getcwd()}
        for number in range(4):
            plain = number == 2 or not streams
            made = trainer(
                parity.plain_strategy(device.type) if plain else parity.streaming_strategy(device.type, **options)
            )
            made.fit(module, models.loader(case, 3), models.loader(case, 1))
            seen += [
                value
                for found in made.validate(module, models.loader(case, 2), verbose=False)
                for value in found.values()
            ]
            seen += [float(out.float().sum()) for out in made.predict(module, models.loader(case, 2))]
        made.fit(module, models.loader(case, 3))  # the same Trainer again, which has ended
        return seen, {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}

    if device.type == "simgpu":
        import simgpu.lightning  # noqa: F401
    (expected, plain), (found, weights) = run(False), run(True)
    assert found == expected
    for name, value in plain.items():
        assert parity.difference(value, weights[name]) is None, name


class Large(L.LightningModule):
    """Weights of 6 MiB that all train."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(24)])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch, number):
        return self.net(batch).float().square().mean()

    def validation_step(self, batch, number):
        self.log("loss", self.training_step(batch, number))

    test_step = validation_step

    def predict_step(self, batch, number):
        return self.net(batch).float().cpu()


@parity.product(precision=["32-true", "bf16-mixed"], place=["host", "device"], device=parity.DEVICES)
@pytest.mark.few(2)
def test_what_a_fit_left_on_the_disk_stays_there_while_a_run_evaluates(precision, place, device):
    """Memory for all weights is more than the budget, with which the fit itself goes on after that."""
    if device.type == "simgpu":
        importlib.import_module("simgpu.lightning")
    batches = [torch.randn(4, 256, generator=torch.Generator().manual_seed(n)) for n in range(2)]

    def run(strategy):
        module, said = Large(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            accelerator=device.type,
            precision=precision,
            strategy=strategy,
            max_epochs=1,
            enable_checkpointing=False,
            **said,
        )
        data = functools.partial(torch.utils.data.DataLoader, batches, batch_size=None)
        seen = []
        for _ in range(2):
            trainer.fit_loop.epoch_progress.reset()
            trainer.fit(module, data(), data())
            for evaluate in (trainer.validate, trainer.test):
                seen += evaluate(module, data(), verbose=False)
                left.append(in_memory_nbytes([p.data for p in module.parameters()]))
            module.requires_grad_(False)
            seen += [out.sum().item() for out in trainer.predict(module, data())]
            module.requires_grad_(True)
        return seen, module.state_dict()

    left = []
    expected, plain = run(parity.plain_strategy(device.type))
    left.clear()
    options = {"units": "Linear", "window": 1, "host_budget": "4500KiB", "disk": os.getcwd()}
    found, weights = run(parity.streaming_strategy(device.type, optimizer_device=place, **options))
    assert found == expected
    assert all(parity.difference(value, weights[name]) is None for name, value in plain.items())
    assert 0 < max(left) < 4500 << 10

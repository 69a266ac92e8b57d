"""``plan --config``: what is planned is the run of ``fit`` with the same arguments."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sp_lightning.commands import config
from sp_lightning.errors import OptionError

pytest.importorskip("jsonargparse")


class Small(L.LightningModule):
    def __init__(self, width: int = 8, freezes: bool = False):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
        self.freezes = freezes

    def setup(self, stage):
        self.net[0].requires_grad_(not self.freezes)

    def training_step(self, batch, index):
        loss = self.net(batch[0]).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.1)


class Silent(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)


class Rows(L.LightningDataModule):
    def __init__(self, batch_size: int = 2):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=self.batch_size)

    predict_dataloader = train_dataloader


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder for what a run writes, and no arguments of pytest's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["sp_lightning"])


def find(*more, model="Small", devices=("--trainer.devices", "1")):
    given = ["--model", f"test_planned_config.{model}", "--data", "test_planned_config.Rows"]
    return config.find([*given, "--trainer.enable_progress_bar", "false", *devices, *more])


def test_batch_precision_and_options_are_those_of_the_run():
    more = ["--trainer.precision", "bf16-mixed", "--trainer.strategy.window", "2"]
    more += ["--trainer.accumulate_grad_batches", "2", "--trainer.gradient_clip_val", "1.0", "--data.batch_size", "4"]
    run = find(*more)
    found = [run[name] for name in ("precision", "window", "accumulate", "clip")]
    assert found == ["bf16-mixed", 2, 2, True] and run["batch"][0].shape == (4, 8)


def test_the_model_is_made_with_its_arguments_and_optimizer():
    module = find("--model.width", "32")["module"]()
    assert [type(one) for one in module.configure_optimizers()] == [torch.optim.AdamW]
    before = [parameter.clone() for parameter in module.parameters()]
    assert module.net[0].out_features == 32
    module.training_step([torch.ones(2, 8)], 0).backward()  # which logs nothing
    module.optimizers().step()
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("freezes", ["true", "false"])
def test_what_setup_freezes_is_frozen(freezes):
    module = find("--model.freezes", freezes)["module"]()
    assert module.net[0].weight.requires_grad is (freezes == "false")


def test_averages_of_weights_are_copies():
    more = ["--trainer.callbacks", "lightning.pytorch.callbacks.StochasticWeightAveraging"]
    assert find(*more, "--trainer.callbacks.swa_lrs", "0.1")["copies"] == 1


@pytest.mark.parametrize(
    ("chosen", "count"), [("[0,1]", 2), ("0,1", 2), ("1,", 1), ("3", 3), ("-1", None), ("auto", None)]
)
def test_devices_chosen_by_number_are_counted(chosen, count, caplog):
    assert find(devices=("--trainer.devices", chosen))["devices"] == (count or 1)
    assert ("is planned as 1" in caplog.text) == (count is None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"more": ["--trainer.strategy", "ddp"]},
            "trainer.strategy must be superpipeline, with whole layers, .* 'ddp'",
        ),
        ({"more": ["--trainer.strategy.tensor_parallel_size", "2"]}, "must be superpipeline, with whole layers"),
        ({"more": [], "model": "Silent"}, "model must be a module with a training_step"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        find(*arguments.pop("more"), **arguments)


def test_rows_of_data_that_are_fewer_than_a_batch_are_repeated(caplog):
    assert find("--data.batch_size", "32")["batch"][0].shape == (32, 8)
    assert "the data have 8 rows: planned is a batch of 32 such rows" in caplog.text

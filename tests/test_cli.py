"""``python -m sp_lightning``: what it offers, what it says when it cannot, and that its commands use the strategy."""

import importlib.metadata
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import forks
import pytest
from often import often

from sp_lightning.cli import OWN, main

TOY = """
    import lightning as L
    import torch


    class Toy(L.LightningModule):
        def __init__(self, width: int = 4):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))

        def loader(self):
            return torch.utils.data.DataLoader(torch.ones(4, self.net[0].in_features), batch_size=2)

        train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

        def training_step(self, batch, index):
            loss = self.net(batch).mean()
            self.log("a figure with a long name", loss, prog_bar=True)
            return loss

        def validation_step(self, batch, index):
            return self.net(batch).mean()

        test_step = predict_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

        def setup(self, stage):
            print(stage.value, "with", type(self.trainer.strategy).__name__)
"""
CONFIG = """
    seed_everything: false
    model:
      class_path: toy.Toy
    trainer:
      accelerator: cpu
      devices: 1
      logger: false
      enable_checkpointing: false
      enable_progress_bar: false
      enable_model_summary: false
      fast_dev_run: true
"""
BY_NAME = """
      strategy: superpipeline
"""
BY_CLASS = """
      strategy:
        class_path: sp_lightning.SuperpipelineStrategy
        init_args:
          window: 2
          transfer: 1
"""


@pytest.fixture
def toy(monkeypatch):
    """Writes a module and its configuration where the test runs; gives the arguments that name them."""

    def write(strategy):
        pathlib.Path("toy.py").write_text(textwrap.dedent(TOY))
        pathlib.Path("config.yaml").write_text(textwrap.dedent(CONFIG + strategy))
        return ["--config", "config.yaml"]

    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.setattr(sys, "argv", ["sp_lightning"])  # else LightningCLI warns that it was given two command lines
    yield write
    sys.modules.pop("toy", None)


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    listed = capsys.readouterr().out.split("for options):\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == ["fit", "validate", "test", "predict", *OWN]


def imported_by(*arguments, modules=("sp_lightning",)):
    """The modules that a process, with these to begin with, has imported after a command of ours."""
    code = """
import atexit, sys
from sp_lightning.cli import main
atexit.register(lambda: sys.stderr.write("imported: " + " ".join(sys.modules)))
main(sys.argv[1:])
"""
    done = forks.run(code, *arguments, modules=modules)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stderr.rpartition("imported: ")[2].split()}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in OWN)])
def test_help_imports_neither_torch_nor_lightning(arguments):
    assert not {"torch", "lightning", "torchmetrics", "transformers"} & imported_by(*arguments)


def test_the_doctor_imports_no_lightning():
    found = imported_by("doctor", "--device", "cpu", modules=("torch",))
    assert not {"lightning", "torchmetrics", "transformers"} & found


ORDERS = [
    "import sp_lightning; from lightning import Trainer",
    "from lightning import Trainer; import sp_lightning",
    "import sp_lightning; from lightning.pytorch import Trainer",
    "import sp_lightning.options; from lightning.pytorch.trainer import Trainer",
]


@pytest.mark.slow
@pytest.mark.parametrize("imports", ORDERS)
def test_the_strategy_is_registered_in_any_order_of_imports(imports):
    makes = "; print(type(Trainer(strategy='superpipeline', accelerator='cpu', logger=False).strategy).__name__)"
    done = forks.run(imports + makes, modules=("torch",))
    assert done.stdout == "SuperpipelineStrategy\n", done.stderr


def test_fabric_takes_the_strategy_by_its_name():
    code = "import sp_lightning; from lightning import Fabric; Fabric(strategy='superpipeline', accelerator='cpu')"
    code += "; assert 'sp_lightning.lightning.fabric' in __import__('sys').modules"
    done = forks.run(code, modules=("torch",))
    assert done.returncode == 0, done.stderr


def test_public_names_and_modules_come_when_they_are_used():
    import sp_lightning

    assert all(getattr(sp_lightning, name).__name__ in (name, "SuperpipelineStrategy") for name in sp_lightning.__all__)
    assert sp_lightning.hf.streaming.__name__ == "streaming"
    with pytest.raises(AttributeError, match="module 'sp_lightning' has no attribute 'nothing'"):
        sp_lightning.nothing  # noqa: B018


def test_version_is_the_installed_one(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == importlib.metadata.version("sp-lightning")


def test_a_reader_that_has_read_enough_is_no_error(capfd, monkeypatch):
    """As of `plan ... | head`: no line about a broken pipe, here or as Python ends."""
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as stdout, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", stdout)
        main(["plan", "--model", "llama-3b", "--machine", "rtx3060"])
    assert ended.value.code == 128 + signal.SIGPIPE and capfd.readouterr().err == ""


def test_without_jsonargparse_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    with pytest.raises(SystemExit, match="2"):
        main(["fit"])
    needed = "fit needs jsonargparse, which is not installed: pip install 'sp-lightning[cli]'"
    assert needed in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_program_it_trains_and_its_bar_has_one_line(toy):
    """Without a terminal, whose width the bar would know."""
    bar = ["--trainer.enable_progress_bar", "true", "--trainer.callbacks", "RichProgressBar"]
    command = [sys.executable, "-m", "sp_lightning", "fit", *toy(""), *bar]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("COLUMNS", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert "fit with SuperpipelineStrategy" in done.stdout and done.returncode == 0, done.stderr
    assert re.search(r"Epoch 0/.* device: [\d.]+ [KM]?i?B", done.stdout), done.stdout


@pytest.mark.parametrize("command", often(["fit", "validate", "test", "predict"]))
def test_each_command_uses_the_strategy_by_default(command, toy, capsys):
    main([command, *toy("")])
    assert f"{command} with SuperpipelineStrategy" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", [BY_NAME, BY_CLASS], ids=["name", "class"])
def test_yaml_names_the_strategy_or_its_class(strategy, toy, capsys):
    main(["fit", *toy(strategy)])
    assert "fit with SuperpipelineStrategy" in capsys.readouterr().out


def test_another_strategy_can_be_named(toy, capsys):
    main(["fit", *toy("\n      strategy: auto\n")])
    assert "fit with SingleDeviceStrategy" in capsys.readouterr().out

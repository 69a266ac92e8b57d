"""benchmarks/clients: runs of other libraries are compared bit by bit, and the page says what the harness found."""

from __future__ import annotations

import importlib
import pathlib
import re

import pytest
import torch

import models

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "works-with.md"


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("clients.harness")


@pytest.fixture
def script(harness):
    return importlib.import_module("clients.run")


def fit(strategy, package="lightning"):
    """A client's work: two epochs of a small module, and a forecast."""
    L = importlib.import_module("pytorch_lightning" if package == "pytorch-lightning" else "lightning.pytorch")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = models.stack_of(models.Block, 3)()

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def predict_step(self, batch, index):
            return self.net(batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module, loader = Module(), torch.utils.data.DataLoader([models.vectors(i)[0] for i in range(3)], batch_size=None)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(**options, strategy=strategy, max_epochs=2, enable_checkpointing=False)
    trainer.fit(module, loader)
    return [module, trainer.predict(module, loader)]


def fabric(strategy):
    from lightning.fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    net = models.stack_of(models.Block, 3)()
    net, optimizer = lightning.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    for index in range(3):
        lightning.backward(net(models.vectors(index)[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    lightning.strategy.teardown()
    return net.module


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning", "pytorch-lightning", "fabric"])
def test_a_client_of_each_package_is_run_on_all_sides(package, harness):
    if package == "pytorch-lightning":
        pytest.importorskip("pytorch_lightning")
    sides = []

    def run(strategy):
        sides.append(strategy)
        return fabric(strategy) if package == "fabric" else fit(strategy, package)

    found = harness.compare(harness.Client("lightning", package, "", "", run))
    assert re.fullmatch(r"same bits: [36] losses, \d+ results", found)
    assert sides == ["auto", "auto", harness.NAME, harness.NARROW]


def test_the_page_has_a_row_for_each_client_and_none_differs(script):
    text = PAGE.read_text()
    table = text[text.index(script.BEGIN) : text.index(script.END)]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    written = [(row[0], row[2].split()[0], *row[3:5]) for row in rows]
    packages = {"fabric": "Fabric"}
    assert written == [
        (client.library, packages.get(client.package, client.package), client.passed, client.needs)
        for client in script.CLIENTS.values()
    ]
    assert len(rows) >= 8 and all(re.fullmatch(r"same bits: \d+ losses, \d+ results", row[5]) for row in rows)

"""``pytorch_lightning``, the same Lightning under another name."""

from __future__ import annotations

import importlib

import forks
import lightning as L
import pytest
import torch
from often import often, slow

import models
import parity
import sp_lightning

pl = pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.filterwarnings("ignore")


def strategies():
    import sp_lightning.pytorch_lightning

    return sp_lightning.pytorch_lightning


class Module(pl.LightningModule):
    """A zoo module of the other package."""

    def __init__(self, case="mlp"):
        super().__init__()
        self.case = models.case(case)
        self.net = self.case.make()

    def training_step(self, batch, index):
        loss = self.case.loss(self.net, batch)
        self.log("loss", loss, batch_size=1)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.case.loss(self.net, batch), batch_size=1)

    def predict_step(self, batch, index):
        return self.case.predict(self.net, batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def trainer(folder, package=pl, **options):
    given = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "default_root_dir": folder}
    return package.Trainer(**{**given, **parity.QUIET, **options})


def outcome(folder, strategy, case="mlp", ckpt=None, save=None, **options):
    torch.manual_seed(0)
    module = Module(case)
    ours = trainer(folder, strategy=strategy, **options)
    ours.fit(module, models.loader(module.case, 4), models.loader(module.case, 2), ckpt_path=ckpt)
    if save is not None:
        ours.save_checkpoint(save)
    predictions = ours.predict(module, models.loader(module.case, 2))
    return [dict(module.named_parameters()), ours.optimizers[0].state_dict(), predictions, ours.callback_metrics]


OPTIONS = [
    {},
    {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true"},
]


@pytest.mark.parametrize("options", [{}, *map(slow, OPTIONS[1:])], ids=str)
@pytest.mark.parametrize("case", often(["adapters", "mlp"]))
def test_a_fit_has_the_plain_runs_bits(tmp_path, case, options):
    ours = strategies().SuperpipelineStrategy(window=1)
    parity.assert_same(outcome(tmp_path, "auto", case, **options), outcome(tmp_path, ours, case, **options))
    assert ours.handle.closed and ours.handle.stats()["bytes_up"] > 0


@pytest.mark.parametrize("saves, loads", often([("ours", "auto"), ("auto", "ours"), ("ours", "ours")]))
def test_a_run_is_resumed(tmp_path, saves, loads):
    def strategy(side):
        return strategies().SuperpipelineStrategy(window=1) if side == "ours" else side

    outcome(tmp_path, strategy(saves), save=tmp_path / "half.ckpt", max_epochs=1)
    parity.assert_same(outcome(tmp_path, "auto"), outcome(tmp_path, strategy(loads), ckpt=tmp_path / "half.ckpt"))


def test_a_checkpoint_goes_to_the_other_package(tmp_path):
    expected = outcome(tmp_path, "auto")
    outcome(tmp_path, strategies().SuperpipelineStrategy(window=1), save=tmp_path / "half.ckpt", max_epochs=1)
    torch.manual_seed(1)
    module = models.ZooModule(models.case("mlp"))
    module.configure_optimizers = lambda: Module.configure_optimizers(module)
    lightnings = trainer(tmp_path, L, strategy=sp_lightning.SuperpipelineStrategy(window=1))
    lightnings.fit(module, models.loader(module.case, 4), ckpt_path=tmp_path / "half.ckpt")
    parity.assert_same(expected[:2], [dict(module.named_parameters()), lightnings.optimizers[0].state_dict()])


def test_the_name_is_registered_and_the_callback_reports(tmp_path):
    callback = strategies().SuperpipelineCallback()
    ours = trainer(tmp_path, strategy="superpipeline", callbacks=[callback])
    assert type(ours.strategy) is strategies().SuperpipelineStrategy
    ours.fit(module := Module(), models.loader(module.case, 4))
    import lightning_fabric

    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, strategy="superpipeline")
    assert type(fabric.strategy) is strategies().SuperpipelineFabricStrategy


def test_a_module_of_the_other_package_is_refused_by_lightning(tmp_path):
    for package, module in ((pl, models.ZooModule(models.case("mlp"))), (L, Module())):
        package.Trainer(strategy="auto", accelerator="cpu", logger=False)  # the plain one says the same
        with pytest.raises(TypeError, match="must be a `LightningModule`"):
            trainer(tmp_path, package, strategy="superpipeline").fit(module, models.loader(module.case, 2))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.5.5", "9.9.0"])
def test_another_version_is_named_when_the_strategy_is_made(version):
    code = f"""
import pytorch_lightning.callbacks
import sp_lightning
pytorch_lightning.__version__ = "{version}"
del pytorch_lightning.callbacks.WeightAveraging  # which this version lacks
pytorch_lightning.Trainer(strategy="superpipeline", accelerator="cpu")
"""
    done = forks.run(code)
    found = f"sp_lightning.pytorch_lightning needs pytorch_lightning 2.6, found {version}: cannot import name"
    assert f"ImportError: {found} 'WeightAveraging'" in done.stderr and done.returncode == 1


def test_both_packages_have_the_same_names():
    from sp_lightning.lightning import names as ours
    from sp_lightning.pytorch_lightning import names as others

    assert ours.__all__ == others.__all__
    for name in ours.__all__:
        one, other = getattr(ours, name), getattr(others, name)
        assert getattr(one, "__name__", type(one).__name__) == getattr(other, "__name__", type(other).__name__)
        assert one is not other or name == "rank_zero_info", name


def test_the_command_line_takes_the_strategy_by_its_class(tmp_path):
    cli = importlib.import_module("pytorch_lightning.cli")
    ours = "sp_lightning.pytorch_lightning"
    given = f"""
trainer:
  accelerator: cpu
  strategy:
    class_path: {ours}.SuperpipelineStrategy
    init_args: {{window: 2}}
  callbacks:
    - class_path: {ours}.SuperpipelineCallback
"""
    (tmp_path / "config.yaml").write_text(given)
    made = cli.LightningCLI(Module, run=False, args=["--config", str(tmp_path / "config.yaml")])
    assert made.trainer.strategy.options.window == 2
    assert type(made.trainer.strategy) is importlib.import_module(ours).SuperpipelineStrategy

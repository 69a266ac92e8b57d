"""Trainer runs leave what plain runs leave: over the zoo, and where a step itself reads and writes weights."""

import functools

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from often import often
from stream_programs import CHUNK, Net, compare, device_named
from torch.utils._pytree import tree_leaves

import models
import parity
from sp_lightning import SuperpipelineStrategy
from sp_lightning.errors import ExactnessError

CLIP = ("norm", 0.05)
SETTINGS = {  # beside those of test_exactness.py
    "both_bf16": (
        {"window": 1, "transfer": 1, "activations": "recompute+offload"},
        {"precision": "bf16-mixed", "clip": CLIP},
    ),
    "resident": ({"window": 2, "transfer": 2, "resident": 1, "activations": "recompute"}, {}),
    "as_is": ({"window": 1, "wire_dtype": "as-is"}, {"precision": "bf16-mixed"}),
    "seen": ({"window": 1}, {"see": "backward"}),
}
WRITES = ("rescaled_weight", "rescaled_data", "max_norm_embedding")  # in their forward: not with recomputation


def is_possible(name, setting):
    options, settings = SETTINGS[setting]
    if "precision" in settings and "autocast" not in models.ZOO[name].tags:
        return False
    return not (name in WRITES and "recompute" in options.get("activations", ""))


class StreamStrategy(SuperpipelineStrategy):
    """Streams the model in slices so small that each weight has several; steps none beside backward."""

    def __init__(self, device, **options):
        super().__init__(device=device, **{"window": 2, "transfer": 1, "optimizer_overlap": False, **options})

    def _streamed(self, module):
        return super()._streamed(module, chunk=CHUNK)


RUNS = [(name, setting) for name in models.ZOO for setting in SETTINGS if is_possible(name, setting)]


@pytest.mark.parametrize("name, setting", often(RUNS, *RUNS[::10]))
@pytest.mark.simgpu
def test_the_zoo_trains_with_the_bits_of_plain_runs(name, setting):
    import simgpu.lightning  # noqa: F401

    options, settings = SETTINGS[setting]
    make = functools.partial(models.ZooModule, models.ZOO[name], optimizer="adamw", fused=False)
    device = device_named("simgpu")
    want = parity.record(make, SingleDeviceStrategy(device=device), accelerator="simgpu", **settings)
    got = parity.record(make, StreamStrategy(device, **options), accelerator="simgpu", **settings)
    parity.compare(want, got)


@pytest.mark.parametrize("name", WRITES)
def test_recompute_refuses_weights_written_by_a_forward(name):
    make = functools.partial(models.ZooModule, models.ZOO[name], optimizer="adamw", fused=False)
    strategy = StreamStrategy("cpu", window=1, activations="recompute")
    with pytest.raises(ExactnessError, match="writes to its weights in its forward"):
        parity.record(make, strategy, accelerator="cpu")


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = Net(), []

    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def train_dataloader(self):
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        return torch.utils.data.DataLoader(batches, batch_size=None)


def fit(kind, strategy, tmp_path, precision=None):
    L.seed_everything(3, verbose=False)
    module = kind()
    trainer = parity.make_trainer(strategy, "simgpu", precision=precision, max_epochs=2, default_root_dir=tmp_path)
    trainer.fit(module)
    return module


def same(one, other):
    compare("value", tree_leaves(one), tree_leaves(other))


class ReadsInItsStep(Module):
    """Compute from weights in the step itself, without gradients, and write one, alone and by rows."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)

    def training_step(self, batch, index):
        with torch.no_grad():
            scale = 1 + self.net.head.weight.norm() + self.frozen.weight.norm()
            self.net.blocks[1].up.weight.clamp_(-0.1, 0.1)
            self.net.blocks[2].up.weight[0].mul_(0.5)
        assert self.frozen.weight.device == self.net.head.weight.device == batch.device
        return super().training_step(torch.nn.functional.linear(batch, self.frozen.weight), index) * scale


@pytest.mark.simgpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_code_of_a_step_reads_and_writes_weights_on_the_device(precision, tmp_path):
    import rounding

    import simgpu.lightning  # noqa: F401

    with rounding.norms_round_otherwise():
        want = fit(ReadsInItsStep, SingleDeviceStrategy(device=device_named("simgpu")), tmp_path, precision=precision)
        got = fit(ReadsInItsStep, StreamStrategy(device_named("simgpu")), tmp_path, precision=precision)
    same([want.losses, want.state_dict()], [got.losses, got.state_dict()])

"""What a door promises about steps beside backward, gradients that are saved, and half-applied steps."""

import io
import pickle

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from stream_programs import Net, compare, streamed
from streamed import StreamStrategy

from sp_lightning.errors import ExactnessError, HalfAppliedStepError


def beside_backward(model, optimizer, handle):
    """Take a step whose units are stepped while backward runs."""

    def closure():
        model(torch.ones(4, 8)).square().mean().backward()

    with handle.stepping(optimizer, is_early=True):
        optimizer.step(closure)


def test_an_option_that_a_hook_changes_in_backward_is_refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.blocks[2].up.weight.register_hook(lambda grad: optimizer.param_groups[0].update(lr=0.05))
    with streamed(model, "cpu") as handle, pytest.raises(ExactnessError, match="options of the optimizer changed"):
        beside_backward(model, optimizer, handle)


def test_a_hook_in_backward_that_reads_a_stepped_weight_is_refused():
    model = Net()
    last = model.blocks[-1].up.weight
    model.blocks[0].up.weight.register_hook(lambda grad: grad + last.detach().sum())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, "cpu") as handle, pytest.raises(ExactnessError, match="stepped"):
        beside_backward(model, optimizer, handle)


def test_a_gradient_is_saved_by_itself():
    model = Net()
    with streamed(model, "cpu"):
        model(torch.ones(4, 8)).sum().backward()
        grad = model.blocks[0].norm.weight.grad
        file = io.BytesIO()
        torch.save(grad, file)
        assert file.tell() < 4096  # its unit's take more
        for copied in (pickle.loads(pickle.dumps(grad)), torch.load(io.BytesIO(file.getvalue()))):
            assert type(copied) is torch.Tensor and torch.equal(copied, grad)


class Module(L.LightningModule):
    """Fails in backward once, when the last blocks were stepped."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.net, self.fails_at = Net(), fails_at
        self.net.blocks[0].up.weight.register_hook(self.fail)

    def fail(self, grad):
        if self.trainer.global_step == self.fails_at:
            raise ZeroDivisionError

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01, foreach=False, fused=False)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(128.0).view(16, 8) / 64, batch_size=4)


def fit(module, strategy, tmp_path, **options):
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, **options},
    )
    trainer.fit(module)
    return trainer


def test_a_half_applied_step_is_not_saved_after_the_run(tmp_path):
    module = Module(fails_at=2)
    with pytest.raises(ZeroDivisionError):
        fit(module, StreamStrategy("cpu", window=1, optimizer_overlap=True), tmp_path)
    with pytest.raises(HalfAppliedStepError, match="Load the last checkpoint"):
        module.trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert not list(tmp_path.rglob("*.ckpt"))


def test_without_overlap_a_failed_step_is_saved(tmp_path):
    module = Module(fails_at=2)
    with pytest.raises(ZeroDivisionError):
        fit(module, StreamStrategy("cpu", window=1, optimizer_overlap=False), tmp_path)
    module.trainer.save_checkpoint(tmp_path / "after.ckpt")


def test_several_fits_of_one_module_are_those_of_plain_runs(tmp_path):
    def run(strategy):
        L.seed_everything(0, verbose=False)
        module = Module()
        for _ in range(2):
            fit(module, strategy(), tmp_path)
        return [value.clone() for value in module.state_dict().values()]

    plain = run(lambda: SingleDeviceStrategy(device="cpu"))
    compare("weights", plain, run(lambda: StreamStrategy("cpu", window=1, optimizer_overlap=True)))

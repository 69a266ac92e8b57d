"""That Lightning's Trainer runs on the simulated device, by accelerator name."""

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

import simgpu.lightning


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
        self.losses, self.seen = [], set()

    def training_step(self, batch, _):
        y = self.net(batch[0])
        self.seen.add((batch[0].device.type, self.device.type, y.dtype))
        loss = y.float().pow(2).mean()
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("mean", self.net(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_trainer(precision, tmp_path):
    def fit(accelerator, **kwargs):
        L.seed_everything(0, verbose=False)
        module, x = Module(), torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x)
        loader = torch.utils.data.DataLoader(data, 8, pin_memory=accelerator == "simgpu")
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=1,
            precision=precision,
            max_epochs=2,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **kwargs,
        )
        trainer.fit(module, loader, loader)
        return module

    module = fit("simgpu", strategy=SingleDeviceStrategy(device=torch.device("simgpu", 0)))
    dtype = {"32-true": torch.float32, "16-mixed": torch.float16}.get(precision, torch.bfloat16)
    assert module.seen == {("simgpu", "simgpu", dtype)} and not simgpu.races()
    losses = torch.stack(module.losses).cpu()
    assert losses[-1] < losses[0]
    if precision != "16-mixed":  # on the CPU Lightning makes that bf16-mixed
        assert torch.equal(losses, torch.stack(fit("cpu").losses))

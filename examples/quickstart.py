"""Trains one LightningModule twice, plainly and with its weights streamed, and compares all weights and the last loss.

python examples/quickstart.py [--window 2] [--layers 8] [--width 128] [--steps 8] [--accelerator auto]

Where there is an accelerator the model is larger, so that its weights are what takes the memory.
"""

import argparse
import logging
import warnings

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from sp_lightning import SuperpipelineStrategy

VOCABULARY = 512


class LanguageModel(L.LightningModule):
    """A small causal transformer, as anybody would write it: nothing in it knows that it may be streamed."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.1, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)

    def training_step(self, batch, _):
        (tokens,) = batch
        loss = cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(arguments, strategy):
    L.seed_everything(1)
    module = LanguageModel(arguments.layers, arguments.width)
    tokens = torch.randint(0, VOCABULARY, (4 * arguments.steps, 65))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=arguments.accelerator,
        devices=1,
        max_epochs=1,
        deterministic=True,  # else kernels of a GPU may give other bits from run to run, plain ones too
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    peak = Peak()
    trainer.callbacks.append(peak)
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=4))
    weights = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    return weights, trainer.callback_metrics["loss"].item(), peak.nbytes


class Peak(L.Callback):
    """Most device bytes of a run; on the CPU, which has none, those that a device would hold of weights, gradients and
    optimizer state."""

    nbytes = 0

    def on_train_start(self, trainer, module):
        if module.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()

    def on_train_end(self, trainer, module):
        if module.device.type != "cpu":
            self.nbytes = torch.accelerator.max_memory_allocated()
        elif isinstance(trainer.strategy, SuperpipelineStrategy):
            self.nbytes = trainer.strategy.handle.stats()["window_bytes"]
        else:
            self.nbytes = sum(4 * p.numel() * p.element_size() for p in module.parameters())  # with grad, two moments


def main():
    layers, width = (12, 1024) if torch.accelerator.is_available() else (8, 128)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--accelerator", default="auto")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")

    plain, plain_loss, plain_nbytes = train(arguments, "auto")
    # On the device torch's own code steps, as in the plain run, also where there is no compiler for the host's.
    streamed, loss, nbytes = train(arguments, SuperpipelineStrategy(window=arguments.window, optimizer_device="device"))
    print(f"plain      loss {plain_loss!r:<20} device memory {plain_nbytes / 2**20:8.1f} MiB")
    print(f"streamed   loss {loss!r:<20} device memory {nbytes / 2**20:8.1f} MiB   window {arguments.window}")
    different = [name for name, tensor in plain.items() if not torch.equal(tensor, streamed[name])]
    if different or loss != plain_loss:
        raise SystemExit(f"the runs differ: please report this, with your versions and device: {different}")
    print(f"the loss and {len(plain)} tensors of weights: equal to the last digit")


if __name__ == "__main__":
    main()

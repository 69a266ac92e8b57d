"""A Trainer on each rank whose optimizer steps beside backward, and user code in its way (processes.py, Rule 1)."""

from __future__ import annotations

import operator
import os
import tempfile
from typing import Any, NamedTuple

import deferring
import lightning as L
import pretended_nodes
import pytest
import ranked_runs
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import parity
import sp_lightning
from sp_lightning.errors import ExactnessError
from sp_lightning.lightning import step_timing
from sp_lightning.steps import torn_step

STEPS = 6
BLOCKS = 4
WIDTH = 48


class Found(NamedTuple):
    """What a rank has at the end of its run."""

    losses: list[float]
    seen: list[Tensor]  # by user code at the beginning of the next step
    parameters: dict[str, Tensor]
    state: list[Tensor]


def made(what: str, module: Module) -> torch.optim.Optimizer:
    """Make the optimizer: in groups of which one takes operators for lists, or without state."""
    first, *others = module.blocks
    if what == "groups":
        rest = [p for block in (*others, module.head) for p in block.parameters()]
        return torch.optim.AdamW(
            [{"params": first.parameters(), "lr": 3e-3}, {"params": rest, "foreach": True}], lr=1e-2
        )
    if what == "no state":
        return torch.optim.SGD(module.parameters(), lr=0.1)
    if what == "replicated":
        return torch.optim.Adafactor(module.parameters(), lr=1e-2)
    return torch.optim.AdamW(module.parameters(), lr=1e-2, amsgrad=what == "amsgrad")


class Module(L.LightningModule):
    """Blocks, each a unit, and what the user's code does with them on this rank."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.losses: list[float] = []
        self.seen: list[Tensor] = []
        self.average = torch.zeros(WIDTH, WIDTH)
        self.kept: list[Tensor] = []

    @property
    def of_one(self) -> bool:
        """Whether what user code does is done here: by the last rank alone, if by one alone."""
        return "of one rank" not in self.what or self.global_rank == self.trainer.world_size - 1

    def look(self, batch: Tensor) -> None:
        """Do what user code may do at the beginning of a step, perhaps before all ranks have ended the one before."""
        if self.what == "sees weights":
            self.seen += [self.head.weight.clone(), self.blocks[2].bias.data.sum()]
        if self.what == "sees a state dict":
            self.seen += [value.clone() for value in self.state_dict().values()]
        if self.what == "sees optimizer state" and self.global_rank == 0:
            states = self.trainer.optimizers[0].state_dict()["state"].values()
            self.seen += [value.clone() for state in states for value in state.values()]
        if self.what == "averages weights":
            self.average.lerp_(self.blocks[3].weight.detach().cpu(), 0.1)
            self.seen.append(self.average.clone())
        if self.what == "evaluates on one rank" and self.global_rank == 0:
            with torch.no_grad():
                self.seen.append(self.head(self.blocks[2](batch)).clone())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.look(batch)
        block = self.blocks[1]
        if self.what == "rate of one rank" and index == 3 and self.of_one:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.02
        if self.what == "writes weights":
            with torch.no_grad():
                block.weight.mul_(0.999)
                block.bias.detach().numpy()[3] *= 1.01
        if "refers to weights" in self.what and index == 2 and self.of_one:
            self.kept = [block.weight.detach()]
        x = batch
        for number, each in enumerate(self.blocks):
            if not ("skips" in self.what and number == 1 + (index + self.global_rank) % 3):
                x = x + torch.tanh(each(x))
            if number == 2 and "reads weights in backward" in self.what and self.of_one:
                x.register_hook(lambda grad: grad * (1 + 0 * self.head.weight.sum().item()))
        loss = self.head(x).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return made(self.what, self)


class AfterSteps(L.Callback):
    """What runs after a step that is not deferred.

    Autograd sees each step of a weight by its version: a backward that needs the earlier weight is an error.
    """

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}  # versions after each step

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        steps = trainer.global_step
        self.seen[steps] = [parameter._version for parameter in module.parameters()]
        assert all(map(operator.lt, self.seen.get(steps - 1, []), self.seen[steps]))
        state = trainer.optimizers[0].state
        if module.what == "touches all":  # reads, and writes what was there
            for parameter in module.parameters():
                parameter.data.mul_(1.0)
                state[parameter]["exp_avg"].sum()
        if module.what == "writes state":
            state[module.blocks[1].weight]["exp_avg"].mul_(0.9)
        if "refers to state" in module.what and module.of_one and module.trainer.global_step == 2:
            module.kept = [state[module.blocks[1].weight]["exp_avg"]]


class Looks(L.Callback):
    """What runs before a step may read gradients, for all that is known."""

    def on_after_backward(self, *_: Any) -> None: ...


class KeepsState(L.Callback):
    """Keeps the optimizer's state, if it does not outlive the run."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.states = parity.divided_states(trainer.strategy)


class Scales(L.Callback):
    """Scales a gradient after backward."""

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        module.blocks[1].weight.grad.mul_(0.5)


class Clips(L.Callback):
    """Clips gradients after backward."""

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 1e-3)


def after_drifting() -> tuple[str, str | None]:
    """Train with another rate on one rank; return the error, and why no checkpoint may be saved then."""
    modules: list[L.LightningModule] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Module, "configure_optimizers", lambda self: modules.append(self) or made("", self))
        try:
            train({"window": 2, "units": ["Linear"]}, what="rate of one rank")
        except ExactnessError as error:
            return str(error), torn_step.why_not_saved(modules)
    return "no error", None


def train(
    options: dict[str, Any] | None,
    accelerator: str = "cpu",
    what: str = "",
    slow_rank: int | None = None,
    defers: bool = False,
    **trainer: Any,
) -> tuple[Found, int, int]:
    """Train on this rank: under DDP if ``options`` is None, else with these under the strategy.

    ``defers``: what is not stepped beside backward is deferred, as where nothing holds it back.

    Returns how many parameters were stepped beside backward, and how many steps were deferred, too.
    """
    size = int(os.environ["WORLD_SIZE"])
    strategy = ranked_runs.plain(size) if options is None else sp_lightning.SuperpipelineStrategy(**options)
    accelerator = "cpu" if options is None else accelerator
    keeps = KeepsState()
    comes_after = not defers or what in ("touches all", "writes state") or "refers to state" in what
    callbacks: list[L.Callback] = [AfterSteps(), keeps] if comes_after else [keeps]
    if "looks at gradients" in what and ("of one rank" not in what or pretended_nodes.rank() == size - 1):
        callbacks.append(Looks())
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as root:
        if not defers:
            patch.setattr(step_timing, "next_is_a_training_step", lambda trainer: False)
        if unseen := {"scales unseen": Scales, "clips unseen": Clips}.get(what):
            callbacks.append(unseen())
            patch.setattr(step_timing, "why_gradients_must_be_final", lambda *_: None)
        with ranked_runs.simulated(accelerator), deferring.slow(None if options is None else slow_rank):
            L.seed_everything(0, verbose=False)
            module = Module(what)
            data = torch.randn(STEPS * size, 4, WIDTH, generator=torch.Generator().manual_seed(1))
            fit = L.Trainer(
                strategy=strategy,
                accelerator=accelerator,
                devices=size // pretended_nodes.count(),
                num_nodes=pretended_nodes.count(),
                max_epochs=1,
                default_root_dir=root,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=callbacks,
                **trainer,
            )
            fit.fit(module, DataLoader(list(data), batch_size=None, shuffle=False))
            stats = {} if options is None else strategy.handle.stats()
    states = keeps.states[0]["state"] if keeps.states else fit.optimizers[0].state
    found = Found(
        module.losses,
        [value.cpu() for value in module.seen],
        {name: p.detach().clone() for name, p in module.named_parameters()},
        [value.clone() for of in states.values() for value in map(deferring.as_tensor, of.values())],
    )
    return found, stats.get("stepped_ahead", 0), stats.get("held_steps", 0)

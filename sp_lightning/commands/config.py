"""The run that ``fit`` with the same arguments would make, as arguments of `sp_lightning.plan`.

LightningCLI parses the arguments and makes data, callbacks and a Trainer, as for ``fit``, but on the CPU and without a
logger; the batch is the first of the Trainer's own loader. The model is made when it is planned, by the same
arguments: ``__init__``, ``setup`` and ``configure_model``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from ..compat.lightning import add_configured_optimizers, attach_data, combined_loader, set_epochs
from ..errors import OptionError
from ..plan.model import refusing, rows_of, with_rows
from .fit import FitCLI

ALLOWED = "a config with which fit begins, or plan by --model"
OF_COMMANDS = "ckpt_path", "weights_only", "return_predictions"  # of the commands alone: they change no plan

log = logging.getLogger(__name__)


class PlannedCLI(FitCLI):
    """LightningCLI that makes everything but the model, on the CPU."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Accept arguments of fit, validate and predict that a config may have and a plan ignores."""
        for name in OF_COMMANDS:
            parser.add_argument(f"--{name}", type=Any, default=None)

    def instantiate_classes(self) -> None:
        """Make data, callbacks and a Trainer with Lightning's own strategy, so that nothing streams; not the model."""
        strategy = self.config.trainer.strategy
        if self.given is None or getattr(strategy, "init_args", {}).get("tensor_parallel_size"):
            found, allowed = getattr(strategy, "class_path", strategy), "superpipeline, with whole layers, for a plan"
            raise OptionError(argument="trainer.strategy", found=found, allowed=allowed)
        others = self.config.clone()
        self._of_model = type(others)(model=others.pop("model"))
        others.trainer.strategy = "auto"
        self.config_init = self.parser.instantiate(others)
        self.datamodule = self.config_init.get("data")
        devices = _devices_of(others.trainer.devices)
        self.trainer = self.instantiate_trainer(accelerator="cpu", devices=devices, logger=False)

    def make_module(self) -> Any:
        """Make the model that the config describes, and attach it to the Trainer."""
        self.model = self.parser.instantiate(self._of_model).model
        self.trainer.strategy.connect(self.model)
        self.model.trainer = self.trainer
        return self.model


def find(words: Sequence[str]) -> dict[str, Any]:
    """Return the run that ``fit`` would make of these arguments, as arguments of `sp_lightning.plan`."""
    cli = PlannedCLI(args=list(words), run=False, save_config_callback=None)
    trainer: Any = cli.trainer
    with refusing("the model of this config could not be made", ALLOWED), torch.device("meta"):
        module = cli.make_module()
    if type(module).training_step is LightningModule.training_step:
        allowed = "a module with a training_step (sp_lightning.plan plans a forward, by Python)"
        raise OptionError(argument="model", found=type(module).__name__, allowed=allowed)
    with refusing("the data of this config could not be read", ALLOWED):
        batch = _first_batch(cli, module)
    return {
        "batch": batch,
        "module": _maker(cli),
        "name": type(module).__name__,
        "precision": cli.config.trainer.precision or "32-true",
        "devices": trainer.num_devices,
        "nodes": trainer.num_nodes,
        **(cli.given or {}),
        "accumulate": trainer.accumulate_grad_batches,
        "clip": bool(trainer.gradient_clip_val),
        "copies": sum(isinstance(one, WeightAveraging | StochasticWeightAveraging) for one in trainer.callbacks),
    }


def _devices_of(named: Any) -> Any:
    """Return how many devices a config takes on each machine; "auto" and -1 count as one, with a warning."""
    if isinstance(named, str) and "," in named:
        named = [number for number in named.split(",") if number.strip()]
    if isinstance(named, list):
        return len(named)
    if str(named) not in ("auto", "-1"):
        return named
    log.warning("devices=%r, which is all of a machine, is planned as 1: --trainer.devices says how many", named)
    return 1


def _first_batch(cli: Any, module: Any) -> Any:
    """Return the first batch of the Trainer's loader, with as many rows as a full one has."""
    trainer, owners = cli.trainer, [owner for owner in (cli.datamodule, module) if owner is not None]
    trainer.state.fn, trainer.state.stage = TrainerFn.FITTING, RunningStage.TRAINING
    attach_data(trainer, module, cli.datamodule)
    for owner in owners:
        owner.prepare_data()
        owner.setup("fit")
    set_epochs(trainer)
    trainer.fit_loop.setup_data()
    loader = combined_loader(trainer.fit_loop)
    batch, *_ = next(iter(loader))
    sizes = [getattr(one, "batch_size", None) for one in loader.flattened]
    if len(sizes) == 1 and sizes[0] is not None and (few := rows_of(batch)) < sizes[0]:
        log.warning("the data have %d rows: planned is a batch of %d such rows", few, sizes[0])
        batch = with_rows(batch, few, sizes[0])
    for owner in owners:
        batch = owner.on_before_batch_transfer(batch, 0)
        batch = owner.on_after_batch_transfer(batch, 0)
    return batch


def _maker(cli: Any) -> Callable[[], Any]:
    """Return a function that makes the config's module with optimizers; steps change nothing, and nothing is logged."""

    def make() -> Any:
        module, strategy = cli.make_module(), cli.trainer.strategy
        module.setup("fit")
        module.configure_model()
        add_configured_optimizers(cli)
        own = module.configure_optimizers

        def configure() -> Any:
            """Return the optimizers as the Trainer sets them up, with steps that run the closure alone."""
            module.configure_optimizers = own
            strategy.setup_optimizers(cli.trainer)
            for optimizer in strategy.optimizers:
                optimizer.step = lambda closure=None: None if closure is None else closure()
            return strategy.optimizers

        module.configure_optimizers = configure
        module.log = module.log_dict = lambda *_, **__: None
        return module

    return make

"""The run that ``fit`` or ``predict`` with the same arguments would make, for a plan: model, batch, precision, options.

LightningCLI parses the arguments and makes the data, the callbacks and the Trainer, as for ``fit``, but on the CPU and
without a logger; the batch is the first of the Trainer's own loader. The model is made when it is planned, by the same
arguments: ``__init__``, ``setup`` if that changes weights, and ``configure_model``. A module that generates answers in
``predict`` says so by an attribute ``generates``: the tokens of each, and where keys and values wait.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ..errors import MissingExtraError, OptionError, UnsupportedError
from ..options import Options
from .model_spec import Spec

OF_COMMANDS = "ckpt_path", "weights_only", "return_predictions"  # of fit and predict themselves: they change no plan
BATCH_HOOKS = "on_before_batch_transfer", "on_after_batch_transfer"
OF_TRAINING = (
    "activations",
    "optimizer_overlap",
    "fused_optimizer",
    "optimizer_device",
    "master_weights",
    "divide_state",
)


@dataclass(frozen=True)
class PlannedRun:
    """A run to plan for."""

    spec: Spec
    precision: str
    options: dict[str, Any]  # of the strategy
    accumulate: int  # batches before a step of the optimizer
    copies: int  # of the weights, that callbacks have
    trained_copies: int  # of the trained ones alone, that callbacks say they have, by an attribute of this name
    devices: int = 1  # of each machine, each with such a batch
    nodes: int = 1  # machines
    own_gradients: bool = False  # whether each of several devices has its own
    answer: int | None = None  # tokens of each answer, if the run generates them
    cache: str | None = None
    optimizer: Any = None  # a name or a function of parameters; None for the module's own
    clip: bool = False  # whether gradients are clipped
    notes: tuple[str, ...] = ()  # what was assumed


def find(arguments: Sequence[str]) -> PlannedRun:
    """Find the run of ``fit`` with these arguments, or of ``predict`` if the module answers."""
    if importlib.util.find_spec("jsonargparse") is None:
        raise MissingExtraError(feature="a plan of a config", package="jsonargparse", extra="cli")
    from ..lightning.names import LightningModule, StochasticWeightAveraging, WeightAveraging

    cli = _parsed(arguments)
    trainer, options = cli.trainer, getattr(cli.trainer.strategy, "options", None)
    if not isinstance(options, Options):
        found, allowed = type(trainer.strategy).__name__, "superpipeline (or left out), for a plan"
        raise OptionError(argument="trainer.strategy", found=found, allowed=allowed)
    if trainer.strategy.shards is not None:
        raise UnsupportedError(
            "layers that are cut across devices cannot be planned yet: plan the whole model, without "
            "tensor_parallel_size, of which each device holds its share of the window and of the gradients"
        )
    with torch.device("meta"):
        module = cli.make_module()
    answer, cache = getattr(module, "generates", (None, None))
    trains = answer is None
    if trains and type(module).training_step is LightningModule.training_step:
        allowed = "a module with a training_step, or one that says what it generates (docs/planning.md)"
        raise OptionError(argument="model", found=type(module).__name__, allowed=allowed)
    before = _weights(module)
    batch = _first_batch(cli, module, trains)
    averages = [one for one in trainer.callbacks if isinstance(one, WeightAveraging | StochasticWeightAveraging)]
    return PlannedRun(
        spec=Spec(
            type(module).__name__,
            _maker(cli, sets_up=before != _weights(module)),
            batch,
            tokens=batch["input_ids"].shape[1] if hasattr(batch, "keys") and "input_ids" in batch else None,
        ),
        precision=str(cli.config.trainer.precision or "32-true"),
        options={name: value for name, value in asdict(options).items() if trains or name not in OF_TRAINING},
        accumulate=trainer.accumulate_grad_batches if trains else 1,
        copies=len(averages) if trains else 0,
        trained_copies=sum(getattr(one, "trained_copies", 0) for one in trainer.callbacks) if trains else 0,
        devices=trainer.strategy.world_size // trainer.num_nodes,
        nodes=trainer.num_nodes,
        own_gradients=trainer.strategy.writes_gradients,
        answer=answer,
        cache=cache,
        clip=bool(trainer.gradient_clip_val) and trains,
        notes=cli.notes,
    )


def _parsed(arguments: Sequence[str]) -> Any:
    """Parse the arguments with a LightningCLI that makes all but the model."""
    from .fit_cli import FitCLI  # needs the extra

    class PlannedCLI(FitCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            for name in OF_COMMANDS:
                parser.add_argument(f"--{name}", type=Any, default=None)

        def instantiate_classes(self) -> None:
            whole = self.config.clone()
            self.of_model = type(whole)(model=whole.pop("model"))
            of_strategy: Any = getattr(whole.trainer.strategy, "init_args", None) or {}
            if of_strategy.get("device") is not None:
                of_strategy.device = "cpu"
            devices, self.notes = _devices_of(whole.trainer, of_strategy)
            self.config_init = self.parser.instantiate_classes(whole)
            self.datamodule = self.config_init.get("data")
            self.trainer = self.instantiate_trainer(accelerator="cpu", devices=devices, logger=False)

        def make_module(self) -> Any:
            self.model = self.parser.instantiate_classes(self.of_model).model
            self.trainer.strategy.connect(self.model)
            self.model.trainer = self.trainer
            return self.model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # the words are those of this command line
        named = {"prog": "python -m sp_lightning plan"}
        return PlannedCLI(args=list(arguments), run=False, save_config_callback=None, parser_kwargs=named)


def _devices_of(trainer: Any, of_strategy: Any) -> tuple[Any, tuple[str, ...]]:
    """Return how many devices of each machine a fit has, and a note where only its machine knows."""
    given = trainer.devices
    if isinstance(given, str) and "," in given:
        given = [number for number in given.split(",") if number.strip()]
    if isinstance(given, list | tuple) and given:
        return len(given), ()
    if str(given).strip() not in ("auto", "-1") or trainer.accelerator == "cpu":
        return given, ()
    tensor = of_strategy.get("tensor_parallel_size") or 1
    fewest = 2 if tensor == "auto" else int(tensor)
    note = f"devices={given!r}, which is all of a machine, is planned as {fewest}: --trainer.devices says how many"
    return fewest, (note,)


def _first_batch(cli: Any, module: Any, trains: bool) -> Any:
    """Return the first batch of the Trainer's loader."""
    from ..compat.lightning import attach_data, combined_loader, set_epochs
    from ..lightning.names import TrainerFn

    trainer, owners = cli.trainer, [owner for owner in (cli.datamodule, module) if owner is not None]
    trainer.state.fn = TrainerFn.FITTING if trains else TrainerFn.PREDICTING
    trainer.predicting, trainer.training = not trains, trains
    attach_data(trainer, module, cli.datamodule)
    for owner in owners:
        owner.prepare_data()
    for owner in owners:
        owner.setup(trainer.state.fn.value)
    set_epochs(trainer)
    loop = trainer.fit_loop if trains else trainer.predict_loop
    loop.setup_data()
    batch, *_ = next(iter(combined_loader(loop)))
    for name in BATCH_HOOKS:
        for owner in owners:
            batch = getattr(owner, name)(batch, 0)
    return batch


def _weights(module: nn.Module) -> dict[str, tuple[torch.Size, bool]]:
    """Return of each weight its shape, and whether it trains."""
    return {name: (parameter.size(), parameter.requires_grad) for name, parameter in module.named_parameters()}


def _maker(cli: Any, sets_up: bool) -> Callable[[], nn.Module]:
    """Return the function that makes the module with its optimizers; its steps neither log nor change weights."""
    from ..compat.lightning import add_configured_optimizers
    from ..lightning.names import Strategy

    def make() -> nn.Module:
        module = cli.make_module()
        if sets_up:
            module.setup(module.trainer.state.fn.value)
        module.configure_model()
        if not hasattr(module, "generates"):
            add_configured_optimizers(cli)
            made = module.configure_optimizers()
            module.configure_optimizers = lambda: made
            strategy = cli.trainer.strategy
            Strategy.setup_optimizers(strategy, cli.trainer)  # where toggling and schedulers look for them
            for optimizer in strategy.optimizers:
                optimizer.step = lambda closure=None: None if closure is None else closure()
            module.optimizers = lambda *_, **__: strategy.optimizers if strategy.optimizers[1:] else optimizer
        module.log = module.log_dict = lambda *_, **__: None
        return module  # type: ignore[no-any-return]

    return make

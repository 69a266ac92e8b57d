"""The run that ``fit`` or ``predict`` with the same arguments would make, for a plan: model, batch, precision, options.

1. LightningCLI parses the arguments and makes the data, the callbacks and the Trainer, as for ``fit``, but on the CPU
   and without a logger; of devices that are chosen by their numbers it takes as many. The first batch is that of the
   Trainer's own loader, of several ones what it combines of them.
2. The model is made without weights, under ``torch.device("meta")``, by the same arguments: ``__init__``, ``setup`` if
   that makes weights, and ``configure_model``, with a device mesh if the strategy has ``tensor_parallel_size``. Code
   that reads weights there can see it by ``torch.get_default_device()``, and read none. A model that depends on data
   (traced_model.py, Rule 1) is made with weights. What ``setup`` freezes is frozen; what callbacks freeze until they
   train it is planned as trained, and a note says so.
3. ``training_step`` has the Trainer with optimizers and schedulers, but nothing is logged, and the optimizers that it
   is given (with manual optimization) change nothing.
4. Lightning's callbacks that average weights have a copy of all. Another callback that has copies of the trained ones
   says how many, by an attribute ``trained_copies``.
5. A module that generates answers in ``predict`` says so by an attribute ``generates``: the tokens of each, and where
   keys and values wait, "device" or "host". Its batch holds the prompts as ``input_ids``, and it is not trained.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ..errors import MissingExtraError, OptionError
from ..options import Options
from .model_spec import Spec

META = torch.device("meta", 0)  # by its index torch.get_default_device knows it, without asking a tensor
OF_COMMANDS = "ckpt_path", "weights_only", "return_predictions"  # of fit and predict themselves: they change no plan
BATCH_HOOKS = "on_before_batch_transfer", "on_after_batch_transfer"


@dataclass(frozen=True)
class Run:
    """A run to plan for."""

    spec: Spec
    precision: str
    options: dict[str, Any]  # of the strategy
    accumulate: int  # batches before a step of the optimizer
    copies: int  # of the weights, that callbacks have
    trained_copies: int  # of the trained ones alone, that callbacks say they have (Rule 4)
    steps: int | None  # of the optimizer, in the whole run, or batches of prompts; None: no end
    devices: int = 1  # of each machine, each with such a batch
    nodes: int = 1  # machines
    own_gradients: bool = False  # whether each of several devices has its own, one FP32 ones (unit_numbers.py, Rule 5)
    answer: int | None = None  # tokens of each answer, if the run generates them (Rule 5)
    cache: str | None = None
    optimizer: Any = None  # a name or a function of parameters; None for the module's own
    tensor_parallel_size: int | None = None  # devices among which layers are cut
    clip: bool = False  # whether gradients are clipped
    notes: tuple[str, ...] = ()  # what was assumed


def find(arguments: Sequence[str]) -> Run:
    """Find the run of ``fit`` with these arguments, or of ``predict`` if the module answers."""
    if importlib.util.find_spec("jsonargparse") is None:
        raise MissingExtraError(feature="a plan of a config", package="jsonargparse", extra="cli")
    from ..compat.lightning import attach_data, combined_loader, set_epochs
    from ..lightning.names import (
        BaseFinetuning,
        LightningModule,
        StochasticWeightAveraging,
        TrainerFn,
        WeightAveraging,
    )
    from ..lightning.strategy import SuperpipelineStrategy
    from ..planning.settings import OF_TRAINING

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # the words are those of this command line
        cli = _parser()(arguments)
    trainer, options = cli.trainer, getattr(cli.trainer.strategy, "options", None)
    if not isinstance(trainer.strategy, SuperpipelineStrategy) or not isinstance(options, Options):
        found, allowed = type(trainer.strategy).__name__, "superpipeline (or left out), for a plan"
        raise OptionError(argument="trainer.strategy", found=found, allowed=allowed)
    shards = trainer.strategy.shards
    with META:
        module = _connected(cli)
    answer, cache = getattr(module, "generates", (None, None))
    asked = answer is not None
    if not asked and type(module).training_step is LightningModule.training_step:
        allowed = (
            "a module with a training_step, or one that says what it generates (docs/planning.md); others have no "
            "plan, and predict in place of plan prints at its end what it took"
        )
        raise OptionError(argument="model", found=type(module).__name__, allowed=allowed)
    trainer.state.fn = TrainerFn.PREDICTING if asked else TrainerFn.FITTING
    trainer.predicting, trainer.training = asked, not asked
    attach_data(trainer, module, cli.datamodule)
    for owner in filter(None, (cli.datamodule, module)):
        owner.prepare_data()
    before = _weights(module)
    for owner in filter(None, (cli.datamodule, module)):
        owner.setup(trainer.state.fn.value)
    after = _weights(module)
    set_up = after if after != before else None
    if asked:
        trainer.predict_loop.setup_data()
        accumulate, steps, loop = 1, sum(trainer.predict_loop.max_batches), trainer.predict_loop
    else:
        set_epochs(trainer)
        trainer.fit_loop.setup_data()
        (accumulate, steps), loop = _accumulation(trainer), trainer.fit_loop
    batch, *_ = next(iter(combined_loader(loop)))
    for name in BATCH_HOOKS:
        for owner in filter(None, (cli.datamodule, module)):
            batch = getattr(owner, name)(batch, 0)
    averages = [one for one in trainer.callbacks if isinstance(one, WeightAveraging | StochasticWeightAveraging)]
    frozen = [one for one in trainer.callbacks if isinstance(one, BaseFinetuning) and not asked]
    length = batch["input_ids"].shape[1] if hasattr(batch, "keys") and "input_ids" in batch else None
    return Run(
        spec=Spec(type(module).__name__, _maker(cli, shards, set_up), batch, tokens=length),
        precision=str(cli.config.trainer.precision or "32-true"),
        options={name: value for name, value in asdict(options).items() if not (asked and name in OF_TRAINING)},
        accumulate=accumulate,
        copies=0 if asked else len(averages),
        trained_copies=0 if asked else sum(getattr(one, "trained_copies", 0) for one in trainer.callbacks),
        steps=int(steps) if 0 <= steps < float("inf") else None,
        devices=trainer.strategy.world_size // trainer.num_nodes,
        nodes=trainer.num_nodes,
        own_gradients=trainer.strategy.writes_gradients,
        answer=answer,
        cache=cache,
        tensor_parallel_size=shards,
        clip=bool(trainer.gradient_clip_val) and not asked,
        notes=cli.notes + tuple(map(_of_freezing, frozen)),
    )


def _of_freezing(callback: Any) -> str:
    """Return the note about a callback that freezes weights until it trains them."""
    return f"{type(callback).__name__} freezes weights until it trains them: planned as a step that trains all"


def _accumulation(trainer: Any) -> tuple[int, float]:
    """Return the batches before a step of the optimizer, and the steps of the whole run, if it has an end.

    Of a schedule of epochs they are the mean of all steps, or those of the last epochs where the run has no end.
    """
    from ..lightning.names import GradientAccumulationScheduler

    schedule = next((one for one in trainer.callbacks if isinstance(one, GradientAccumulationScheduler)), None)
    steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
    if schedule is None:
        return trainer.accumulate_grad_batches, steps
    if trainer.max_epochs == -1 or batches == float("inf"):
        return schedule.scheduling[schedule.epochs[-1] if batches < float("inf") else 0], steps
    taken: Counter[int] = Counter()
    for epoch in range(max(trainer.max_epochs, 1)):
        accumulate = schedule.get_accumulate_grad_batches(epoch)
        left = trainer.max_steps - taken.total() if trainer.max_steps != -1 else batches
        taken[accumulate] += min(math.ceil(batches / accumulate), left)
    mean = sum(accumulate * count for accumulate, count in taken.items()) / max(taken.total(), 1)
    return max(round(mean), 1), taken.total()


def _parser() -> Any:
    """Return the class of a LightningCLI that makes all but the model (Rule 1)."""
    from .fit_cli import FitCLI  # needs the extra

    class Parser(FitCLI):
        def __init__(self, arguments: Sequence[str]) -> None:
            super().__init__(
                args=list(arguments),
                run=False,
                save_config_callback=None,
                parser_kwargs={"prog": "python -m sp_lightning plan"},
            )

        def add_arguments_to_parser(self, parser: Any) -> None:
            for name in OF_COMMANDS:
                parser.add_argument(f"--{name}", type=Any, default=None)

        def instantiate_classes(self) -> None:
            whole = self.config.clone()
            self.of_model = type(whole)(model=whole.pop("model"))
            of_strategy = getattr(whole.trainer.strategy, "init_args", None)
            if of_strategy is not None and of_strategy.get("device") is not None:
                of_strategy.device = "cpu"
            devices, self.notes = _devices_of(whole.trainer, of_strategy)
            self.config_init = self.parser.instantiate_classes(whole)
            self.datamodule = self.config_init.get("data")
            self.trainer = self.instantiate_trainer(accelerator="cpu", devices=devices, logger=False)

    return Parser


def _devices_of(trainer: Any, of_strategy: Any) -> tuple[Any, tuple[str, ...]]:
    """Return how many devices of each machine a fit has, and a note where only its machine knows; see `_parser`."""
    given = trainer.devices
    if trainer.accelerator == "cpu":
        return given, ()
    if isinstance(given, str) and "," in given:
        given = [number for number in given.split(",") if number.strip()]
    if isinstance(given, list | tuple) and given:
        return len(given), ()
    if str(given).strip() in ("auto", "-1"):
        fewest = _fewest_devices(of_strategy, trainer.num_nodes)
        planned = "one" if fewest == 1 else f"{fewest}, the fewest that can have tensor_parallel_size"
        note = f"devices={given!r}, which is all of a machine, is planned as {planned}: --trainer.devices says how many"
        return fewest, (note,)
    return given, ()


def _fewest_devices(of_strategy: Any, machines: int) -> int:
    """Return the fewest devices of each machine that a mesh of the strategy's sizes has; 1 without a mesh."""
    if of_strategy is None or (tensor := of_strategy.get("tensor_parallel_size")) is None:
        return 1
    sizes = [size for size in (tensor, of_strategy.get("data_parallel_size")) if isinstance(size, int)]
    return max(math.ceil(max(math.prod(sizes), 2) / max(machines, 1)), tensor if isinstance(tensor, int) else 1)


def _connected(cli: Any) -> Any:
    """Make the module, with the Trainer that it will have."""
    cli.model = cli.parser.instantiate_classes(cli.of_model).model
    cli.trainer.strategy.connect(cli.model)
    cli.model.trainer = cli.trainer
    return cli.model


def _weights(module: nn.Module) -> dict[str, tuple[torch.Size, bool]]:
    """Return of each weight its shape, and whether it trains."""
    return {name: (parameter.size(), parameter.requires_grad) for name, parameter in module.named_parameters()}


def _maker(cli: Any, shards: int | None, set_up: Any) -> Callable[[], nn.Module]:
    """Return the function that makes the module with its weights and optimizers, as a plan needs it (Rule 2).

    ``set_up``: the weights after the module's ``setup``, if that changes them.
    """
    from ..compat.lightning import add_configured_optimizers
    from ..compat.modules import set_device_mesh
    from ..lightning.names import Strategy
    from ..planning.planned_model import optimizers_in
    from ..planning.traced_model import mesh_in_context
    from ..tracing.fake_tensors import without_data

    def make() -> nn.Module:
        with META if without_data() else contextlib.nullcontext():
            module = _connected(cli)
            if shards is not None:
                set_device_mesh(module, mesh_in_context(shards))
            if set_up is not None:
                _set_up(module, set_up)
            module.configure_model()
        if hasattr(module, "generates"):
            return module  # type: ignore[no-any-return]
        add_configured_optimizers(cli)
        made = module.configure_optimizers()
        module.configure_optimizers = lambda: made
        Strategy.setup_optimizers(cli.trainer.strategy, cli.trainer)  # where toggling and schedulers look (Rule 3)
        _leave_nothing(module, list(optimizers_in(made)))
        return module  # type: ignore[no-any-return]

    return make


def _set_up(module: Any, found: dict[str, tuple[torch.Size, bool]]) -> None:
    """Have a module's weights be those after its ``setup``, which runs again only to make some: it may make data."""
    now, then = ({name: size for name, (size, _) in weights.items()} for weights in (_weights(module), found))
    if now != then:
        module.setup(module.trainer.state.fn.value)
        return
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(found[name][1])


def _leave_nothing(module: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    """Let a step of this module, which no Trainer runs, neither log nor change weights (Rule 3)."""

    def step(closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()

    def nothing(*_: Any, **__: Any) -> None:
        pass

    for optimizer in optimizers:
        optimizer.step = step  # type: ignore[method-assign]
    module.optimizers = lambda *_, **__: optimizers[0] if len(optimizers) == 1 else optimizers
    module.log = module.log_dict = nothing

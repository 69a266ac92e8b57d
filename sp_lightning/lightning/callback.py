"""What a run tells about itself, through what Lightning has for that: loggers, the progress bar, the log."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info

from ..core.recorder import KEPT, RecordedStep
from ..errors import OptionError, UnsupportedError
from ..observe import timeline, timeline_plot
from ..observe.run_report import RunReport
from ..options import format_bytes, is_int
from ..planning.forecast import Plan
from ..runtime.handle import Handle

log = logging.getLogger(__name__)

MOVED = ("fetches", "bytes_up", "bytes_down")
TIMELINE_STEPS = (10, 11, 12)


@runtime_checkable
class Streaming(Protocol):
    """A strategy that streams the module's weights."""

    handle: Handle | None


class SuperpipelineCallback(Callback):
    """Tells what each training step moved, how long it took and what it waited for.

    The strategy adds one for the time of a run when the user added none. It changes no result and nothing that you
    monitor, print or save. Steps are recorded while a progress bar, a timeline or, with ``log_metrics=True``, a logger
    is there to be served: host time for each unit and step (``python benchmarks/telemetry.py``), and no
    synchronisation; else it does nothing.

    With ``log_metrics=True`` **loggers** get these values, all with ``superpipeline/`` before them. The first three are
    those of the step that is logged; the others are means over the steps since the last time, of which the latest is
    two steps old, because nothing waits for the device to be read.

    ==================== ===========================================================================================
    ``fetches``          units brought up
    ``bytes_up``         to the device
    ``bytes_down``       to the host
    ``step_ms``          from one batch to the next
    ``floor_ms``         what such a step has to take at the rates that were measured
    ``floor_share``      floor / step: 1 is as fast as it gets
    ``compute_ms``       in which units computed
    ``stall_weights_ms``, ``stall_gradients_ms``, ``stall_activations_ms``, ``stall_optimizer_ms``
                         in which they did not, by what was waited for
    ``outside_ms``       in which neither is so: data loading, the loss, logging
    ``up_gb_per_s``, ``down_gb_per_s``
                         10**9 bytes per second, while copies ran
    ``device_peak_bytes``, ``host_peak_bytes``
                         the most that was in use so far
    ``resident_share``   of the weights, that is on the device
    ``samples_per_s``, ``tokens_per_s``
                         tokens where a batch has ``input_ids``, or begins with whole numbers in two dimensions
    ==================== ===========================================================================================

    The **progress bar** (tqdm or rich) shows the device's peak and the share of a step that waits. When training begins
    a table predicts what will be where and what a step takes; when it ends, also by an exception, predicted stands
    against measured, and one sentence says what holds the run back.

    Args:
        log_every_n_steps: How often loggers get values, if they do; None is the Trainer's own rhythm.
        timeline: A directory for ``trace.json`` (for https://ui.perfetto.dev) and ``timeline.png``, a picture of it.
        timeline_steps: Which training batches of this fit those show, from 0. Of a shorter run, its last ones.
        plan: For this run (`sp_lightning.plan`): what it predicts is shown and compared with what is measured, and a
            ``window`` that is "auto" starts from its choice.
        progress: Whether to show anything on the terminal: in the progress bar, when training begins and when it ends,
            and while weights move into host memory or a checkpoint is loaded or saved, if that takes over a second.
        log_metrics: Whether loggers get the values above.
    """

    def __init__(
        self,
        log_every_n_steps: int | None = None,
        timeline: str | os.PathLike[str] | None = None,
        timeline_steps: Sequence[int] = TIMELINE_STEPS,
        progress: bool = True,
        plan: Plan | None = None,
        log_metrics: bool = False,
    ) -> None:
        if log_every_n_steps is not None and not (is_int(log_every_n_steps) and log_every_n_steps >= 1):
            raise OptionError(argument="log_every_n_steps", found=log_every_n_steps, allowed="None or an int >= 1")
        steps = list(timeline_steps) if isinstance(timeline_steps, Iterable) else []
        if not steps or not all(is_int(step) and step >= 0 for step in steps):
            raise OptionError(argument="timeline_steps", found=timeline_steps, allowed="batches from 0, at least one")
        self.log_every_n_steps = log_every_n_steps
        self.timeline = None if timeline is None else Path(timeline)
        self.timeline_steps = frozenset(steps)
        if plan is not None and not isinstance(plan, Plan):
            raise OptionError(argument="plan", found=plan, allowed="None or what sp_lightning.plan() returned")
        self.progress = progress
        self.plan = plan
        self.log_metrics = log_metrics
        self._observer: RunReport | None = None
        self._before: Mapping[str, Any] = {}
        self._drawn: list[RecordedStep] = []  # in the timeline
        self._written = False
        self._chosen: dict[str, int] = {}  # by "auto" in the run that is resumed
        self._handle: Handle | None = None  # of the last fit

    def __getstate__(self) -> dict[str, Any]:
        """Leave what watches a run out of a copy, which keeps what "auto" chose, as a checkpoint does."""
        return {**vars(self), "_handle": None, "_observer": None, "_chosen": SuperpipelineCallback.state_dict(self)}

    # ---- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a strategy that streams nothing, and a timeline that could not be written after hours of training."""
        self._handle = None  # the last one holds as much host memory as the next one will
        if not isinstance(trainer.strategy, Streaming):
            raise UnsupportedError(
                f"SuperpipelineCallback reports what strategy 'superpipeline' moves, but the Trainer uses "
                f"{type(trainer.strategy).__name__}; pass strategy='superpipeline' or remove the callback"
            )
        if self.timeline is not None and stage == "fit":
            _check_directory(self.timeline)
        if self.timeline is not None and importlib.util.find_spec("matplotlib") is None:
            log.warning(
                "superpipeline: %s gets a trace but no picture, which needs matplotlib: pip install "
                "'sp-lightning[plots]', then python -m sp_lightning timeline %s --plot FILE.png",
                self.timeline,
                self.timeline / "trace.json",
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Recording begins if somebody will look; sizes are those that "auto" chose in the run that is resumed."""
        self._handle = _handle(trainer)
        if self._chosen:
            self._handle.resume(self._chosen)
        elif self.plan is not None:
            self._handle.resume(self.plan.chosen, "as planned")
        bar = self._bar(trainer)
        self._drawn, self._written = [], False
        if self._handle.units and (self._loggers(trainer) or bar is not None or self.timeline is not None):
            drawn = self.timeline_steps if self.timeline is not None else ()
            also = {*drawn, *(step - 1 for step in drawn)}  # whose optimizer may run on into it
            self._observer = RunReport(self._handle, self.plan, max(1, self._rhythm(trainer) // KEPT), also)
        if bar is not None and self._observer is not None:
            bar.get_metrics = _Shown(bar, self._observer)
            rank_zero_info(_table(self._observer.table(trainer.optimizers)))

    def state_dict(self) -> dict[str, Any]:
        """What "auto" chose; empty, and so not in the checkpoint, where it chose nothing."""
        return self._chosen if self._handle is None else self._handle.chosen()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """For `on_fit_start`: there is nothing yet that streams."""
        self._chosen = state_dict

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Counters before the step."""
        self._before = _handle(trainer).stats() if self._loggers(trainer) else {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """What it added to them, and what can be told of the steps before."""
        if self._observer is not None:
            self._keep(self._observer.update(), pl_module)
        if not self._before or not self._is_due(trainer):
            return
        now = _handle(trainer).stats()
        values = {name: float(now[name] - self._before[name]) for name in MOVED}
        if self._observer is not None:
            values |= self._observer.figures()
            values |= _per_second(batch, values["step_ms"] / 1e3) if "step_ms" in values else {}
        for logger in self._loggers(trainer):
            # Not through self.log(): what the user monitors, prints and saves stays what it was.
            logger.log_metrics(
                {f"superpipeline/{name}": value for name, value in values.items()},
                step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What was, and what holds the run back."""
        self._finish(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same, as far as it came."""
        with contextlib.suppress(Exception):  # the exception that is under way is what the user has to see
            self._finish(trainer, pl_module)
        self._leave(trainer)  # Lightning does not call teardown then

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The progress bar is as it was."""
        self._leave(trainer)

    # ---- details

    def _leave(self, trainer: Trainer) -> None:
        self._observer = None
        self._before = {}
        if trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.__dict__.pop("get_metrics", None)

    def _bar(self, trainer: Trainer) -> Any:
        bar = trainer.progress_bar_callback
        return bar if self.progress and bar is not None and not getattr(bar, "is_disabled", False) else None

    def _loggers(self, trainer: Trainer) -> Sequence[Logger]:
        return trainer.loggers if self.log_metrics else ()

    def _rhythm(self, trainer: Any) -> int:
        return self.log_every_n_steps or int(trainer.log_every_n_steps)

    def _is_due(self, trainer: Trainer) -> bool:
        if self.log_every_n_steps is None:
            return bool(trainer._logger_connector.should_update_logs)
        return bool((trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % self.log_every_n_steps == 0)

    def _keep(self, steps: Sequence[RecordedStep], pl_module: LightningModule) -> None:
        """Those of the timeline, which is written when all of them are there."""
        if self.timeline is None or self._written:
            return
        self._drawn += [step for step in steps if step.number in self.timeline_steps]
        if len(self._drawn) == len(self.timeline_steps):
            self._write(self.timeline, self._drawn, pl_module)

    def _write(self, directory: Path, steps: Sequence[RecordedStep], pl_module: LightningModule) -> None:
        assert self._observer is not None
        self._written = True
        made = self._observer.timeline(type(pl_module).__name__, steps)
        try:
            trace = timeline.save(made, directory / "trace.json")
            rank_zero_info(f"superpipeline: wrote {trace}")
            if importlib.util.find_spec("matplotlib") is not None:
                timeline_plot.save([made], directory / "timeline.png")
        except (OSError, ImportError) as error:  # a full disk, a broken matplotlib: training goes on
            log.warning("superpipeline: the timeline is not all in %s: %s", directory, error)

    def _finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        observer = self._observer
        if observer is None:
            return
        self._keep(observer.close(), pl_module)
        steps = self._drawn or observer.last[-len(self.timeline_steps) :]
        if self.timeline is not None and not self._written and steps:
            self._write(self.timeline, steps, pl_module)
        if self._bar(trainer) is not None:
            for line in observer.report():
                rank_zero_info(f"superpipeline: {line}")
        self._observer = None


def _check_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        allowed = f"a directory that can be written to ({error.strerror})"
        raise OptionError(argument="timeline", found=str(path), allowed=allowed) from error


class _Shown:
    """Serve as the ``get_metrics`` of a progress bar, from which it learns what to show: a value that is logged to it
    could be monitored, too. A copy of the bar has its own ``get_metrics`` again."""

    def __init__(self, bar: Any, observer: RunReport) -> None:
        self._bar = bar
        self._asked = bar.get_metrics
        self._observer = observer

    def __call__(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        share = self._observer.stall_share()
        waits = {} if share is None else {"waits": f"{share:.0%}"}
        peak = format_bytes(self._observer.device_peak())
        return {**self._asked(trainer, pl_module), "device": peak, **waits}

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._bar, "get_metrics")


def _table(rows: Mapping[str, str]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("superpipeline", "", box=box.SIMPLE_HEAD)
    for name, value in rows.items():
        table.add_row(name, value)
    text = io.StringIO()
    Console(width=100, file=text, color_system=None).print(table)
    return text.getvalue().rstrip()


def _per_second(batch: Any, step_s: float) -> dict[str, float]:
    """Samples, and tokens where the batch shows them."""
    first = next(_tensors(batch), None)
    if first is None or not first.dim():
        return {}
    named = batch.get("input_ids") if isinstance(batch, Mapping) else None
    ids = named if isinstance(named, torch.Tensor) else first
    whole = ids.dim() == 2 and ids.dtype in (torch.int32, torch.int64)
    return {"samples_per_s": len(first) / step_s, **({"tokens_per_s": ids.numel() / step_s} if whole else {})}


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def _handle(trainer: Trainer) -> Handle:
    handle = trainer.strategy.handle  # type: ignore[attr-defined]
    assert handle is not None
    return handle  # type: ignore[no-any-return]

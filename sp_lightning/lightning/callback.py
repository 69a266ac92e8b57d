"""The callback that reports on a run through Lightning's loggers, its progress bar and the log."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ..compat.lightning import should_log, steps_taken
from ..errors import OptionError, UnsupportedError
from ..handle import Handle
from ..host.recorder import KEPT, RecordedStep
from ..observe.report import Planned, RunReport, floor_s, ranks_in_words, typical
from ..observe.timeline import Timeline
from ..options import check_writable, format_bytes, is_int
from .names import Callback, LightningModule, Logger, Trainer, rank_zero_info

log = logging.getLogger(__name__)

TIMELINE_STEPS = (10, 11, 12)


class SuperpipelineCallback(Callback):
    """Report what each training step moved, how long it took and what it waited for.

    The strategy adds this callback for the time of a run if the user passed none. Results, and the metrics that you
    monitor, print or save, stay as they are. Steps are recorded only for a progress bar, a timeline or, with
    ``log_metrics=True``, a logger. Recording costs host time for each unit and step
    (``python benchmarks/telemetry.py``) and no synchronisation.

    With ``log_metrics=True`` **loggers** get these values, each with the prefix ``superpipeline/``. They are means over
    the steps since the last logged one; the latest of them is two steps old, because reading never waits for the
    device.

    ==================== ===========================================================================================
    ``bytes_up``, ``bytes_down``
                         bytes copied to the device, and to the host, in a step
    ``step_ms``          time from one batch to the next
    ``floor_ms``         time in which the busiest of copies, compute and optimizer worked
    ``floor_share``      floor / step: 1 is the best possible
    ``compute_ms``       time in which units computed
    ``stall_weights_ms``, ``stall_gradients_ms``, ``stall_activations_ms``, ``stall_optimizer_ms``
                         time in which units waited, by what for
    ``stall_disk_ms``, ``disk_in_gb_per_s``, ``disk_out_gb_per_s``
                         the same for the disk, read and written; only with ``host_budget`` or ``disk``
    ``outside_ms``       the rest of the step: data loading, the loss, logging
    ``up_gb_per_s``, ``down_gb_per_s``
                         10**9 bytes per second while copies ran
    ``device_peak_bytes``, ``host_peak_bytes``
                         the most memory in use so far
    ``resident_share``   share of the weights that is on the device
    ``samples_per_s``, ``tokens_per_s``
                         tokens only if a batch has ``input_ids``, or begins with a two-dimensional integer tensor
    ==================== ===========================================================================================

    The **progress bar** (tqdm or rich) shows the device's peak memory and the share of a step that waits. When training
    begins, a table has units, window and memory. When it ends, by an exception too, three lines have what a step took,
    the peaks of memory, and what bounded the run. With several devices the first rank reports for all: a line has what
    each measured. Timelines of other ranks are in folders of their own (``rank1``, ...).

    Args:
        log_every_n_steps: How often loggers get values; None uses the Trainer's own interval.
        timeline: A directory for ``trace.json`` (for https://ui.perfetto.dev) and its picture ``timeline.png``.
        timeline_steps: The training batches of this fit in the timeline, from 0. A shorter run shows its last ones.
        plan: The plan of this run (`sp_lightning.plan`): its step and memory stand beside the measured ones.
        progress: Whether to show anything on the terminal: values in the progress bar, the table and the report.
        log_metrics: Whether loggers get the values above.
    """

    def __init__(
        self,
        log_every_n_steps: int | None = None,
        timeline: str | os.PathLike[str] | None = None,
        timeline_steps: Sequence[int] = TIMELINE_STEPS,
        progress: bool = True,
        plan: Planned | None = None,
        log_metrics: bool = False,
    ) -> None:
        if log_every_n_steps is not None and not (is_int(log_every_n_steps) and log_every_n_steps >= 1):
            raise OptionError(argument="log_every_n_steps", found=log_every_n_steps, allowed="None or an int >= 1")
        steps = list(timeline_steps) if isinstance(timeline_steps, Iterable) else []
        if not steps or not all(is_int(step) and step >= 0 for step in steps):
            raise OptionError(argument="timeline_steps", found=timeline_steps, allowed="one or more ints >= 0")
        self.log_every_n_steps = log_every_n_steps
        self.timeline = None if timeline is None else Path(timeline)
        self.timeline_steps = frozenset(steps)
        if plan is not None and not isinstance(plan, Planned):
            raise OptionError(argument="plan", found=plan, allowed="None or a plan from sp_lightning.plan()")
        self.progress = progress
        self.plan = plan
        self.log_metrics = log_metrics
        self._report: RunReport | None = None
        self._drawn: list[RecordedStep] = []  # the steps for the timeline, so far
        self._written = False
        self._handle: Handle | None = None  # the handle of the latest fit

    def __getstate__(self) -> dict[str, Any]:
        """Leave the handle and the report out of a copy."""
        return {**vars(self), "_handle": None, "_report": None}

    # ---- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise for another strategy, and for a timeline directory to which nothing could be written after training."""
        self._handle = None  # the previous one occupies as much host memory as the next one will
        if not _streams(trainer):
            raise UnsupportedError(
                f"SuperpipelineCallback reports on strategy 'superpipeline', but the Trainer uses "
                f"{type(trainer.strategy).__name__}; pass strategy='superpipeline' or remove the callback"
            )
        if self.timeline is not None and stage == "fit":
            check_writable(self.timeline, "timeline")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start recording if anything will read the record; give progress bar and log their first figures."""
        strategy: Any = trainer.strategy
        self._handle = handle = strategy.handle
        bar = self._bar(trainer)
        self._drawn, self._written = [], False
        wanted = bool(self._loggers(trainer) or bar is not None or self.timeline is not None)
        if handle.units and strategy.broadcast(wanted):  # all ranks record if the first one does
            drawn = self.timeline_steps if self.timeline is not None else ()
            also = {*drawn, *(step - 1 for step in drawn)}  # a deferred step may run on into the next
            every = (self.log_every_n_steps or trainer.log_every_n_steps) // KEPT  # type: ignore[attr-defined]
            self._report = RunReport(handle, self.plan, max(1, every), also)
        if bar is not None and self._report is not None:
            bar.get_metrics = _BarMetrics(bar, self._report)
            rows = (f"  {name:9} {value}" for name, value in self._report.table().items())
            rank_zero_info("\n".join(["superpipeline", *rows]))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures of the steps before."""
        if self._report is None:
            return
        self._keep(self._report.update(), pl_module)
        step, every = steps_taken(trainer), self.log_every_n_steps
        is_due = should_log(trainer) if every is None else (step + 1) % every == 0
        if not (is_due and self._loggers(trainer) and (figures := self._report.figures())):
            return
        figures |= per_second(batch, figures["step_ms"] / 1e3)
        for logger in trainer.loggers:
            # Not through self.log(), which would add to what the user monitors, prints and saves.
            logger.log_metrics({f"superpipeline/{name}": value for name, value in figures.items()}, step=step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the report, with the figures of all ranks, and write the timeline."""
        self._finish(trainer, pl_module, with_ranks=trainer.world_size > 1)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the strategy, print the report of an unfinished run, and write its timeline."""
        if _streams(trainer):
            strategy: Any = trainer.strategy
            strategy.note_exception(exception)
        with contextlib.suppress(Exception):  # must not hide the exception that is being raised
            self._finish(trainer, pl_module)
        self.teardown(trainer, pl_module, "fit")  # Lightning does not call it after an exception

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the report, and give the progress bar its own ``get_metrics`` back."""
        self._report = None
        if trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.__dict__.pop("get_metrics", None)

    # ---- details

    def _bar(self, trainer: Trainer) -> Any:
        """Return the Trainer's progress bar if this callback may show values in it, else None."""
        bar = trainer.progress_bar_callback
        return bar if self.progress and bar is not None and not getattr(bar, "is_disabled", False) else None

    def _loggers(self, trainer: Trainer) -> Sequence[Logger]:
        """Return the loggers that get values: none without ``log_metrics``."""
        return trainer.loggers if self.log_metrics else ()

    def _keep(self, steps: Sequence[RecordedStep], pl_module: LightningModule) -> None:
        """Collect the recorded steps that the timeline shows, and write it when all of them are there."""
        if self.timeline is None or self._written:
            return
        self._drawn += [step for step in steps if step.number in self.timeline_steps]
        if len(self._drawn) == len(self.timeline_steps):
            self._write(self.timeline, self._drawn, pl_module)

    def _write(self, directory: Path, steps: Sequence[RecordedStep], pl_module: LightningModule) -> None:
        """Write the timeline, of each rank but the first in a folder of its own; warn if it cannot be written."""
        assert self._report is not None and self._handle is not None
        self._written = True
        if rank := self._handle.team.rank:
            directory = directory / f"rank{rank}"
        made = Timeline.of(type(pl_module).__name__, steps, self._report.last, floor_s(typical(steps)))
        try:
            rank_zero_info(f"superpipeline: wrote {made.write(directory)}")
        except (OSError, ImportError) as error:  # a full disk, a broken matplotlib: training goes on
            log.warning("superpipeline: could not write all of the timeline to %s: %s", directory, error)

    def _finish(self, trainer: Trainer, pl_module: LightningModule, with_ranks: bool = False) -> None:
        """Stop recording, print the report, and write the timeline unless it is written. Collective ``with_ranks``."""
        report = self._report
        if report is None:
            return
        self._keep(report.close(), pl_module)
        of_ranks: list[str] = []
        if with_ranks:
            figures = trainer.strategy.all_gather(torch.tensor(report.rank_figures(), dtype=torch.float64))
            of_ranks.append(ranks_in_words(figures.tolist()))
        steps = self._drawn or report.last[-len(self.timeline_steps) :]
        if self.timeline is not None and not self._written and steps:
            self._write(self.timeline, steps, pl_module)
        if self._bar(trainer) is not None:
            for line in (*report.lines(), *of_ranks):
                rank_zero_info(f"superpipeline: {line}")
        self._report = None


class _BarMetrics:
    """Replace a progress bar's ``get_metrics`` to add our values to those it shows.

    Values logged to the bar could be monitored, too. A copy of the bar has its own ``get_metrics`` again."""

    def __init__(self, bar: Any, report: RunReport) -> None:
        self._bar = bar
        self._original = bar.get_metrics
        self._report = report

    def __call__(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        share = self._report.stall_share()
        waits = {} if share is None else {"waits": f"{share:.0%}"}
        peak = format_bytes(self._report.device_peak())
        return {**self._original(trainer, pl_module), "device": peak, **waits}

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._bar, "get_metrics")


def per_second(batch: Any, step_s: float) -> dict[str, float]:
    """Return samples per second and, if a batch shows its tokens, tokens per second."""
    tensors: list[torch.Tensor] = []
    apply_to_collection(batch, torch.Tensor, tensors.append)
    if not tensors or not tensors[0].dim():
        return {}
    named = batch.get("input_ids") if isinstance(batch, Mapping) else None
    ids = named if isinstance(named, torch.Tensor) else tensors[0]
    found = {"samples_per_s": len(tensors[0]) / step_s}
    if ids.dim() == 2 and ids.dtype in (torch.int32, torch.int64):
        found["tokens_per_s"] = ids.numel() / step_s
    return found


def _streams(trainer: Trainer) -> bool:
    """Whether the Trainer uses this package's strategy."""
    return hasattr(trainer.strategy, "note_exception")

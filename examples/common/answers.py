"""Predictions of many records: counted, written as they come, and gone on with after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from .errors import BadInput
from .files import whole
from .summary import say


class Predicts(L.LightningModule):
    """A module that says at the end how much it predicted: what each of its steps notes as the ``count`` of its batch.

    `Answers` counts.
    """

    counts = "tokens"
    counted = 0

    def on_predict_start(self) -> None:
        self.begin, self.seed = time.perf_counter(), torch.initial_seed()

    def on_predict_end(self) -> None:
        counted, seconds = (
            float(self.trainer.strategy.reduce(torch.tensor(figure), reduce_op=how))
            for figure, how in ((self.counted, "sum"), (time.perf_counter() - self.begin, "max"))
        )
        say(f"{counted:.0f} {self.counts} in {seconds:.1f} s, {counted / seconds:.1f} {self.counts} per second")


class Answers(L.Callback):
    """Writes what was predicted, a line for each record, as soon as it is there; the file appears when all are.

    The data has ``records`` with the ``number`` of each, its place in the file, in the order in which they are
    predicted, and a ``batch_size``; it begins after the first ``done``. The module is one of `Predicts`.

    Until then the lines are in a file beside it, as they came, from which the same run goes on after a kill: with the
    next whole batch, so that batches, and what they draw at random, are those of an undisturbed run. On several
    devices each has such a file, and a run begins anew.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.out: Any = None
        self.counted = 0
        self.failed = 0  # records that have an error instead

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.path = Path(trainer.default_root_dir) / self.file
        ranks = range(trainer.world_size)
        self.parts = [self.path.with_name(f"{self.path.name}.part{f'.{rank}' * (len(ranks) > 1)}") for rank in ranks]
        self.part = self.parts[trainer.global_rank]
        self.of = self.path.with_name(f"{self.path.name}.of")  # says of which run the part is
        self.kept = 0
        if len(ranks) == 1:
            self.go_on(trainer, trainer.datamodule, pl_module)

    def go_on(self, trainer: L.Trainer, data: Any, module: Any) -> None:
        """Keep the whole batches of the same run, if one was killed."""
        digest = hashlib.sha256(json.dumps(data.records).encode()).hexdigest()
        how = [data.batch_size, torch.initial_seed(), str(trainer.precision), trainer.limit_predict_batches]
        run = json.dumps([digest, *how, *module.settings])
        if self.part.exists() and self.of.exists() and self.of.read_text() == run:
            with self.part.open("rb") as part:
                sizes = [len(line) for line in part if line.endswith(b"\n")]
            limit, whole_run = trainer.limit_predict_batches, -(-len(data.records) // data.batch_size)
            limit = int(limit * whole_run) if isinstance(limit, float) else min(limit, whole_run)
            batches = min(len(sizes) // data.batch_size, max(0, limit - 1))  # something is left to answer
            trainer.limit_predict_batches = limit - batches  # of those that are left
            data.done = batches * data.batch_size
            self.kept = sum(sizes[: data.done])
            say(f"going on after {data.done} records that {self.part} has answers to")
        else:
            self.part.unlink(missing_ok=True)  # before the other file says that it is of this run
            with whole(self.of) as of:
                of.write_text(run)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.out = self.part.open("ab")
        self.out.truncate(self.kept)

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.out.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in outputs).encode())
        self.out.flush()
        self.counted += batch["count"]
        self.failed += batch.get("failed", 0)
        speed = self.counted / (time.perf_counter() - pl_module.begin)
        show_beside(trainer.progress_bar_callback, f"{speed:.1f} {pl_module.counts}/s")

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.out = self.out.close()
        pl_module.counted = self.counted
        trainer.strategy.barrier()  # all parts are there
        if trainer.is_global_zero:
            self.merge([one["number"] for one in trainer.datamodule.records])
            self.of.unlink(missing_ok=True)
        failed = int(trainer.strategy.reduce(torch.tensor(self.failed), reduce_op="sum"))
        if failed >= (records := len(trainer.datamodule.records)):
            raise BadInput(f"none of the {records} records can be read: {self.path} has the error of each in its line")

    def merge(self, numbers: Sequence[int]) -> None:
        """Put the answers, of which each device has one in turn, in the order of the file: theirs are these numbers."""
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(stack.enter_context(whole(self.path)).open("wb"))
            parts = [stack.enter_context(part.open("rb")) for part in self.parts]
            starts = [[0, *itertools.accumulate(map(len, part))][:-1] for part in parts]
            for at in sorted(range(sum(map(len, starts))), key=numbers.__getitem__):
                which, line = at % len(parts), at // len(parts)
                parts[which].seek(starts[which][line])
                out.write(parts[which].readline())
        for part in self.parts:
            part.unlink()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.out is not None:
            self.out.close()
            if len(self.parts) > 1 or not self.part.stat().st_size:  # nothing to go on from
                self.part.unlink(missing_ok=True)
                self.of.unlink(missing_ok=True)


def show_beside(bar: Any, text: str) -> None:
    """Show a figure in a progress bar of either kind, beside the batches that were predicted."""
    if getattr(bar, "predict_progress_bar_id", None) is not None:
        bar.progress.update(bar.predict_progress_bar_id, description=f"{bar.predict_description} {text}")
    elif hasattr(bar, "predict_progress_bar"):
        bar.predict_progress_bar.set_postfix_str(text)

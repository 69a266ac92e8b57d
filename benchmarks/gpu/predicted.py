"""The plan's predictions for this strategy's rows: before a run on a known machine, or beside the measurement."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sp_lightning import plan
from sp_lightning.bench import Entry, Setting
from sp_lightning.bench.figures import Result, Row
from sp_lightning.core.machine import Machine
from sp_lightning.memory.partition import partition
from sp_lightning.planning.planner import RESERVED
from sp_lightning.planning.shapes import build

OPTIMIZERS = {"adamw": "AdamW", "adamw-fused": "AdamW", "sgd": "SGD"}


@dataclass(frozen=True)
class Prediction:
    """The plan's prediction for a row."""

    label: str
    device_nbytes: int  # without the reserve
    step_s: float
    floor_s: float
    binds: str

    @classmethod
    def of(cls, entry: Entry, setting: Setting, machine: Machine, target: str) -> Prediction:
        """Predict a row, with the options that it is run with."""
        shape = setting.shape
        options = {"activations": setting.activations, **entry.options}
        if options["window"] == "all":
            with torch.device("meta"):
                options["window"] = len(partition(build(shape)))
        found = plan(
            functools.partial(build, shape),
            shape.inputs(setting.batch, setting.seq, torch.Generator()),
            precision=setting.precision,
            optimizer=OPTIMIZERS[setting.optimizer],
            machine=machine,
            device=target,
            loss=lambda module, batch: module(**batch),
            clip=setting.clip is not None,
            **options,
        )
        nbytes = sum(nbytes for name, nbytes in found.device_terms.items() if name != RESERVED)
        return cls(entry.label, nbytes, found.step_s, found.floor_s, found.binds)

    def beside(self, row: Row) -> dict[str, Any]:
        """Return the prediction, and the shares by which it is above the measurement."""
        step_s = row.step_s.median if row.step_s is not None else None
        return {
            **asdict(self),
            "device_off": self.device_nbytes / row.device_peak - 1 if row.device_peak else None,
            "step_off": self.step_s / step_s - 1 if step_s else None,
        }


def beside(result: Result, rows: list[Row]) -> list[dict[str, Any]]:
    """Return the prediction beside the measurement for each of these rows of a training run."""
    target = torch.device(result.setting.device).type
    machine = result.machine
    if result.setting.device_memory is not None:
        machine = replace(machine, device_nbytes=result.setting.device_memory)
    return [Prediction.of(row.entry, result.setting, machine, target).beside(row) for row in rows]

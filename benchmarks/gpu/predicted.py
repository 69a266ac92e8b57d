"""The plan's predictions for this strategy's rows: before a run on a known machine, or beside the measurement."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any

import shapes
import torch
from compare import Row
from contenders import Setting

from sp_lightning import plan
from sp_lightning.plan.machines import Machine


@dataclass(frozen=True)
class Prediction:
    """The plan's prediction for a row."""

    label: str
    device_nbytes: int  # without the reserve
    step_s: float
    bound_by: str

    @classmethod
    def of(cls, row: Row, setting: Setting, machine: Machine, target: str) -> Prediction:
        """Predict a row, with the options that it is run with."""
        found = plan(
            functools.partial(shapes.build, setting.model, setting.rank),
            shapes.inputs(setting.model, setting.batch, setting.seq, torch.Generator()),
            precision=setting.precision,
            optimizer="AdamW",
            machine=machine,
            device=target,
            loss=lambda module, batch: module(**batch).loss,
            clip=setting.clip is not None,
            accumulate=setting.accumulate,
            **{"activations": setting.activations, **row.options},
        )
        nbytes = sum(nbytes for name, nbytes in found.device_terms.items() if name != "reserve")
        return cls(row.label, nbytes, found.step_s, found.bound_by)

    def beside(self, row: Row) -> dict[str, Any]:
        """Return the prediction, and the shares by which it is above the measurement."""
        peak = row.most("device_peak")
        return {
            **asdict(self),
            "device_off": self.device_nbytes / peak - 1 if peak else None,
            "step_off": self.step_s / row.step_s - 1 if row.step_s else None,
        }


def beside(setting: Setting, machine: Machine, rows: list[Row]) -> list[dict[str, Any]]:
    """Return the prediction beside the measurement for each of these rows of a training run."""
    if setting.device_memory is not None:
        machine = replace(machine, device_nbytes=setting.device_memory)
    target = torch.device(setting.device).type
    return [Prediction.of(row, setting, machine, target).beside(row) for row in rows]

"""The rows of a comparison: contenders by name, and the options of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError
from ..options import Options

OURS = "superpipeline"
TRAINING = ("plain", OURS, "fsdp2", "deepspeed", "torchao")
INFERENCE = ("plain", OURS, "accelerate", "group-offload")
SEVERAL = ("plain", OURS, "fsdp2")  # with several devices
ONLY_BY_NAME = ("zero-offload", "superoffload")
NAMES = tuple(dict.fromkeys((*TRAINING, *INFERENCE, *ONLY_BY_NAME)))
WINDOWS = (1, 2, 4, "all")


@dataclass(frozen=True)
class Entry:
    """One row: a contender and its options."""

    contender: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name of the row."""
        return " ".join([self.contender, *(f"{name}={value}" for name, value in self.options.items())])


def entries(
    contenders: Iterable[str], windows: Iterable[int | str] = WINDOWS, options: Mapping[str, Any] | None = None
) -> list[Entry]:
    """Make a row for each contender, and one for each window of this strategy.

    Args:
        contenders: Names.
        windows: Units on the device at a time: ints, "all" or "auto".
        options: Further options of ``SuperpipelineStrategy``.
    """
    rows: list[Entry] = []
    for name in contenders:
        if name not in NAMES:
            raise OptionError(argument="contenders", found=name, allowed="among " + ", ".join(NAMES))
        rows += [_ours(window, options or {}) for window in windows] if name == OURS else [Entry(name)]
    return rows


def _ours(window: int | str, options: Mapping[str, Any]) -> Entry:
    if window != "all":
        window = Options.parse(window=window, **options).window
    return Entry(OURS, {"window": window, **options})

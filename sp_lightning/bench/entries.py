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
AT_ONCE = "predict_at_once"  # the option of the strategy


@dataclass(frozen=True)
class Entry:
    """One row: a contender and its options."""

    contender: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def at_once(self) -> int:
        """Batches under way at once."""
        return int(self.options.get(AT_ONCE, 1))

    @property
    def label(self) -> str:
        """Name of the row."""
        return " ".join([self.contender, *(f"{name}={value}" for name, value in self.options.items())])


def entries(
    contenders: Iterable[str],
    windows: Iterable[int | str] = WINDOWS,
    options: Mapping[str, Any] | None = None,
    at_once: Iterable[int] = (1,),
) -> list[Entry]:
    """Make a row for each contender, and one for each window of this strategy and number of batches at once.

    Args:
        contenders: Names.
        windows: Units on the device at a time: ints, "all" or "auto".
        options: Further options of ``SuperpipelineStrategy``.
        at_once: Batches that this strategy has under way at once, in inference.
    """
    together: list[Mapping[str, Any]] = [{} if count == 1 else {AT_ONCE: count} for count in at_once]
    rows: list[Entry] = []
    for name in contenders:
        if name not in NAMES:
            raise OptionError(argument="contenders", found=name, allowed="among " + ", ".join(NAMES))
        ours = [_ours(window, options or {}, more) for window in windows for more in together]
        rows += ours if name == OURS else [Entry(name)]
    return rows


def _ours(window: int | str, options: Mapping[str, Any], more: Mapping[str, Any]) -> Entry:
    if window != "all":
        window = Options.parse(window=window, **options).window
    return Entry(OURS, {"window": window, **more, **options})

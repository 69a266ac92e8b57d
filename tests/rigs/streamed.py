"""The Trainer's strategy on the core of handle.py, before that door moves, with settings that users do not have."""

from __future__ import annotations

import dataclasses
from typing import Any

from sp_lightning import SuperpipelineStrategy
from sp_lightning.handle import Settings


class StreamStrategy(SuperpipelineStrategy):
    """Streams the model in small slices, with some resident units; units are not stepped beside backward by default."""

    has_moved = True

    def __init__(self, device: Any = "cpu", chunk: int = 512, resident: int = 0, **options: Any) -> None:
        super().__init__(device=device, **{"window": 2, "transfer": 1, "optimizer_overlap": False, **options})
        self._of_tests = {"chunk": chunk, "resident": resident}

    def _settings(self) -> Settings:
        return dataclasses.replace(super()._settings(), **self._of_tests)

"""The Trainer's strategy with settings that users do not have."""

from __future__ import annotations

from typing import Any

from sp_lightning import SuperpipelineStrategy


class StreamStrategy(SuperpipelineStrategy):
    """Streams the model in small slices, with some resident units; units are not stepped beside backward by default."""

    def __init__(self, device: Any = "cpu", chunk: int = 512, **options: Any) -> None:
        super().__init__(device=device, **{"window": 2, "transfer": 1, "optimizer_overlap": False, **options})
        self._chunk = chunk

    def _streamed(self, module: Any) -> Any:
        return super()._streamed(module, chunk=self._chunk)

"""How tests stream: by hand or in a Trainer, with slices so small that each weight has several."""

from __future__ import annotations

from typing import Any

import stream_programs
import torch
from torch import nn

from sp_lightning import SuperpipelineStrategy


class StreamStrategy(SuperpipelineStrategy):
    """Streams the model in small slices, with some resident units; units are not stepped beside backward by default."""

    def __init__(self, device: Any = "cpu", chunk: int = 512, **options: Any) -> None:
        super().__init__(device=device, **{"window": 2, "transfer": 1, "optimizer_overlap": False, **options})
        self._chunk = chunk

    def _streamed(self, module: Any) -> Any:
        return super()._streamed(module, chunk=self._chunk)


def streaming(module: nn.Module, device: torch.device | str, **options: Any) -> Any:
    """Stream a module; with ``wire_dtype="auto"`` weights travel in bfloat16 where autocast casts them."""
    wire = torch.bfloat16 if options.pop("wire_dtype", "as-is") == "auto" else None
    return stream_programs.stream(module, device, wire=wire, **{"window": 1, "chunk": 512, **options})


def strategy(device: torch.device | str, **options: Any) -> Any:
    """Make a Trainer's strategy."""
    return StreamStrategy(device=device, **{"window": 1, **options})

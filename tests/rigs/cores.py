"""How tests stream: by hand or in a Trainer, with slices so small that each weight has several."""

from __future__ import annotations

from typing import Any

import stream_programs
import streamed
import torch
from torch import nn

CHUNK = 512  # elements that the host steps at a time


def streaming(module: nn.Module, device: torch.device | str, **options: Any) -> Any:
    """Stream a module; with ``wire_dtype="auto"`` weights travel in bfloat16 where autocast casts them."""
    wire = torch.bfloat16 if options.pop("wire_dtype", "as-is") == "auto" else None
    return stream_programs.stream(module, device, wire=wire, **{"window": 1, "chunk": CHUNK, **options})


def strategy(device: torch.device | str, **options: Any) -> Any:
    """Make a Trainer's strategy."""
    return streamed.StreamStrategy(device=device, **{"window": 1, "chunk": CHUNK, **options})

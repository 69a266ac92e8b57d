"""The two cores: that of handle.py, and the one of before, on which several devices and disks still run.

The fixture `core` chooses one for the length of a test. Without it a module streams as by `sp_lightning.stream`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import stream_programs
import streamed
import torch
from torch import nn

import sp_lightning
from sp_lightning.runtime import handle as before

CHUNK = 512  # elements that the new core's host steps at a time, so that each weight has several
chosen = [""]


@contextlib.contextmanager
def use(core: str) -> Iterator[None]:
    """Stream on a core, "new" or "before", while the context is open."""
    chosen.append(core)
    try:
        yield
    finally:
        chosen.pop()


def streaming(module: nn.Module, device: torch.device | str, **options: Any) -> Any:
    """Stream a module on the chosen core; return its handle.

    With ``wire_dtype="auto"`` the new core's weights travel in bfloat16 where autocast casts them.
    """
    if chosen[-1] == "new":
        wire = torch.bfloat16 if options.pop("wire_dtype", "as-is") == "auto" else None
        return stream_programs.stream(module, device, wire=wire, **{"window": 1, "chunk": CHUNK, **options})
    return (before if chosen[-1] else sp_lightning).stream(module, device, **options)


class Before(sp_lightning.SuperpipelineStrategy):
    """The strategy on the core of before, for runs that the other one has."""

    is_before = True


def strategy(device: torch.device | str, **options: Any) -> Any:
    """Make a Trainer's strategy on the chosen core."""
    if chosen[-1] == "new":
        return streamed.StreamStrategy(device=device, **{"window": 1, "chunk": CHUNK, **options})
    return (Before if chosen[-1] else sp_lightning.SuperpipelineStrategy)(device=device, **options)

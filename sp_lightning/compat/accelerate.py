"""Private names of accelerate."""

from __future__ import annotations

import importlib
from typing import Any

DISPATCHED = "_hf_hook"  # the mark of a module that it has dispatched


def accelerate_precision() -> Any:
    """Return accelerate's own setting of mixed precision: "bf16", "fp16", "no", or None if there is none."""
    return importlib.import_module("accelerate.state").AcceleratorState._shared_state.get("_mixed_precision")

"""Private names of accelerate."""

from __future__ import annotations

import importlib
from typing import Any

DISPATCHED = "_hf_hook"  # the mark of a module that it has dispatched


def accelerate_precision() -> Any:
    """Return the mixed precision that accelerate was set up for: "bf16", "fp16", "no" or None."""
    return importlib.import_module("accelerate.state").AcceleratorState._shared_state.get("_mixed_precision")

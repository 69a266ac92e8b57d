"""What ``torch.compile`` leaves alone: a frame that it compiles ends its graph at a call of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def never_compiled(function: F) -> F:
    """Neither the function nor what it calls is compiled."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def not_compiled_itself(function: F) -> F:
    """The function is not compiled; what it calls may be."""
    return cast(F, torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]

"""Parameters of a test, of which the default run takes some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def often(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Mark all of these values slow but the chosen ones, or but the first."""
    every = list(values)
    kept = chosen or tuple(every[:1])
    return [value if value in kept else slow(value) for value in every]


def slow(value: Any) -> Any:
    """Mark one value, or the values of several parameters, slow."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

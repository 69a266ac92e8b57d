"""Which tests a run takes: of parameters the default run takes some, and of all tests a shard takes its share."""

from __future__ import annotations

import zlib
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


def is_in_shard(name: str, shard: str) -> bool:
    """Whether a test is in a shard such as "2/3", which its name alone says."""
    number, count = map(int, shard.split("/"))
    return zlib.crc32(name.encode()) % count == number - 1

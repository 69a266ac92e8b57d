"""Tests of speeds: what else a machine does only makes a run slower, now and then."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

TRIES = 5


def measured_again(test: Callable[..., None]) -> Callable[..., None]:
    """Have a test fail only where it fails as often as ``TRIES`` times in a row."""

    @functools.wraps(test)
    def tried(*args: Any, **settings: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return test(*args, **settings)
            except AssertionError:  # measured while something else ran, or wrong: the last try says which
                continue
        return test(*args, **settings)

    return tried

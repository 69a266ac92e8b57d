"""The cases that the core before refuses: each test of one says which."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def refusal(case: str, error: type[Exception], instead: str) -> Callable[[Test], Test]:
    """Mark a test of a case that is refused with this error, and what to do instead."""
    return lambda test: test

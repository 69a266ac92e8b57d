"""The cases that are refused, as docs/exactness.md lists them: each test of one says which."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def refusal(case: str, error: type[Exception], instead: str) -> Callable[[Test], Test]:
    """Mark a test of a case that is refused with this error, and what to do instead.

    tests/project/test_docs.py reads these words from the test's source, and compares them with the document's table.
    """
    return lambda test: test

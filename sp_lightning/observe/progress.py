"""The time that work has taken, on the terminal, once it takes longer than a second; nothing is left on the screen."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from tqdm import tqdm  # type: ignore[import-untyped]

PATIENCE_S = 1.0
REFRESH_S = 0.2


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show the time that the body of the ``with`` statement has taken; nothing without a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(what, ended), name="superpipeline-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(what: str, ended: threading.Event) -> None:
    """Show the time until ``ended`` is set; run by a thread of its own."""
    if ended.wait(PATIENCE_S):
        return
    with tqdm(desc=what, leave=False, file=sys.stderr, bar_format="{desc}: {elapsed}") as bar:
        while not ended.wait(REFRESH_S):
            bar.refresh()

"""A bar on the terminal while the user waits for something that is not training.

It appears when the wait has lasted a second, leaves nothing behind, and is not there where nobody watches. What is
done by then is asked for from a thread beside the work, which knows nothing of it. Where a display of rich is on the
screen, as Lightning's while it trains, the wait becomes a line of that display, which would draw over a bar below it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tqdm import tqdm  # type: ignore[import-untyped]  # as Lightning's progress bar, beside which it may stand

PATIENCE_S = 1.0
REFRESH_S = 0.2
MB = 1e6


class Display(Protocol):
    """What is needed of ``rich.progress.Progress``."""

    live: Any  # that draws it

    def add_task(self, description: str, *, total: float) -> Any: ...

    def update(self, task_id: Any, *, completed: float) -> None: ...

    def remove_task(self, task_id: Any) -> None: ...

    def refresh(self) -> None: ...


@contextlib.contextmanager
def waiting(
    what: str, total: int, done: Callable[[], int], shown: bool = True, display: Display | None = None
) -> Iterator[None]:
    """Within, the wait.

    Args:
        what: Is waited for, such as "saving last.ckpt".
        total: Bytes in all.
        done: How many of them are, so far; called by another thread.
        shown: Whether there may be a bar; there is none either where standard error is no terminal.
        display: That is on the screen now.
    """
    if not shown or not (sys.stderr.isatty() if display is None else display.live.console.is_terminal):
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_show, args=(what, total, done, ended, display), name="superpipeline-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(what: str, total: int, done: Callable[[], int], ended: threading.Event, display: Display | None) -> None:
    if ended.wait(PATIENCE_S):
        return
    with _below(what, total) if display is None else _within(display, what, total) as advance:
        while not ended.wait(REFRESH_S):
            advance(min(total, done()))


@contextlib.contextmanager
def _below(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of its own."""
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:

        def advance(nbytes: int) -> None:
            bar.n = nbytes
            bar.refresh()

        yield advance


@contextlib.contextmanager
def _within(display: Display, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A line of the display, which counts in whole numbers."""
    line = display.add_task(f"{what} (MB)", total=round(total / MB))

    def advance(nbytes: int) -> None:
        display.update(line, completed=round(nbytes / MB))
        display.refresh()

    try:
        yield advance
    finally:
        display.remove_task(line)
        display.refresh()

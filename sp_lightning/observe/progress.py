"""A progress bar on the terminal for waits outside of training, such as saving a checkpoint.

The bar appears after one second, leaves nothing on the screen, and needs a terminal. A thread polls how much is done,
so the work itself reports nothing. While a rich display is on the screen, as Lightning's is in training, the bar is a
line of that display, because the display would draw over a bar below it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]  # Lightning's own progress bar, beside which ours may appear

PATIENCE_S = 1.0
REFRESH_S = 0.2
MB = 1e6


@contextlib.contextmanager
def waiting(what: str, total: int, done: Callable[[], int], shown: bool = True, display: Any = None) -> Iterator[None]:
    """Show a progress bar while the body of the ``with`` statement runs, once that has taken a second.

    Args:
        what: A title, such as "saving last.ckpt".
        total: Bytes in all.
        done: Returns how many bytes are done; called by another thread.
        shown: Whether a bar may be shown; without a terminal there is none in any case.
        display: The ``rich.progress.Progress`` on the screen, if any.
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


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show the time that the body of the ``with`` statement has taken, where its end cannot be predicted."""
    with waiting(what, 0, lambda: 0):
        yield


def _show(what: str, total: int, done: Callable[[], int], ended: threading.Event, display: Any) -> None:
    """Show a bar and advance it to ``done()`` until ``ended`` is set; run by a thread of its own."""
    if ended.wait(PATIENCE_S):
        return
    with _below(what, total) if display is None else _within(display, what, total) as advance:
        while not ended.wait(REFRESH_S):
            advance(min(total, done()))


@contextlib.contextmanager
def _below(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on the terminal; yield the function that advances it."""
    form = None if total else "{desc}: {elapsed}"
    with tqdm(
        total=total or None, desc=what, unit="B", unit_scale=True, leave=False, file=sys.stderr, bar_format=form
    ) as bar:

        def advance(nbytes: int) -> None:
            bar.n = nbytes
            bar.refresh()

        yield advance


@contextlib.contextmanager
def _within(display: Any, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Add a line, in whole megabytes, to a rich display; yield the function that advances it."""
    line = display.add_task(f"{what} (MB)", total=round(total / MB))

    def advance(nbytes: int) -> None:
        display.update(line, completed=round(nbytes / MB))
        display.refresh()

    try:
        yield advance
    finally:
        display.remove_task(line)
        display.refresh()

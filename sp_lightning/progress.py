"""A bar on the terminal while the user waits for something that is not training.

It appears when the wait has lasted a second, leaves nothing behind, and is not there where nobody watches. What is
done by then is asked for from a thread beside the work, which knows nothing of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from tqdm import tqdm  # type: ignore[import-untyped]  # as Lightning's progress bar, beside which it may stand

PATIENCE_S = 1.0
REFRESH_S = 0.2


@contextlib.contextmanager
def waiting(what: str, total: int, done: Callable[[], int], shown: bool = True) -> Iterator[None]:
    """Within, the wait.

    Args:
        what: Is waited for, such as "saving last.ckpt".
        total: Bytes in all.
        done: How many of them are, so far; called by another thread.
        shown: Whether there may be a bar; there is none either where standard error is no terminal.
    """
    if not shown or not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(what, total, done, ended), name="superpipeline-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(what: str, total: int, done: Callable[[], int], ended: threading.Event) -> None:
    if ended.wait(PATIENCE_S):
        return
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:
        while not ended.wait(REFRESH_S):
            bar.n = min(total, done())
            bar.refresh()

"""The time of work: only where it is long, only on a terminal, and gone afterwards."""

import io
import threading
import time
import types

import pytest

from sp_lightning.observe import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=screen))  # pytest sets sys.stderr again and again
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    monkeypatch.setattr(progress, "REFRESH_S", 0.01)
    return screen


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "superpipeline-progress"]


def test_long_work_shows_its_time(terminal):
    with progress.working("planning"):
        while "planning: 00:00" not in terminal.getvalue():
            time.sleep(0.01)
    assert not threads()


def test_short_work_shows_nothing(terminal):
    with progress.working("planning"):
        pass
    assert not terminal.getvalue() and not threads()


def test_an_error_ends_the_thread(terminal):
    with pytest.raises(ArithmeticError), progress.working("planning"):
        raise ArithmeticError
    assert not threads()

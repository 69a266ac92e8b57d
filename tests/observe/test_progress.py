"""Bars while the user waits: only for long waits, only on a terminal, and gone afterwards."""

import io
import threading
import time
import types
from contextlib import contextmanager

import pytest
from lightning.pytorch.callbacks.progress import rich_progress
from test_callback import fit

import models
import sp_lightning
from sp_lightning.lightning import checkpoints
from sp_lightning.observe import progress

CASE = models.case("mlp")


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


def test_a_long_wait_has_a_bar_with_what_is_done(terminal):
    asked = threading.Semaphore(0)
    with progress.waiting("saving last.ckpt", 2000, lambda: asked.release() or 1000):
        assert asked.acquire(timeout=300) and asked.acquire(timeout=300)  # at the second time the first is drawn
    assert "saving last.ckpt:  50%" in terminal.getvalue() and "1.00k/2.00k" in terminal.getvalue()
    assert not threads()


def test_work_whose_end_is_not_known_shows_its_time(terminal):
    with progress.working("planning"):
        while "planning: 00:00" not in terminal.getvalue():
            time.sleep(0.01)
    assert not threads()


def test_a_short_wait_has_none(terminal):
    with progress.waiting("saving", 2000, lambda: 1000):
        pass
    assert not terminal.getvalue() and not threads()


def test_an_error_in_the_wait_ends_the_bar(terminal):
    with pytest.raises(ArithmeticError), progress.waiting("saving", 2000, lambda: 1000):
        raise ArithmeticError
    assert not threads()


def rich_display(terminal):
    """Lightning's, as it is on the screen while a model trains."""
    rich = pytest.importorskip("rich.console")
    console = rich.Console(file=terminal, force_terminal=True, width=120)
    return rich_progress.CustomProgress(
        "[progress.description]{task.description}", "{task.completed}/{task.total}", console=console
    )


def test_where_rich_draws_the_wait_is_a_line_of_its_display(terminal):
    asked = threading.Semaphore(0)
    with rich_display(terminal) as display:
        display.add_task("Epoch 3", total=10)
        with progress.waiting("saving last.ckpt", 4 * 10**6, lambda: asked.release() or 10**6, display=display):
            assert asked.acquire(timeout=300) and asked.acquire(timeout=300)
            assert [task.description for task in display.tasks] == ["Epoch 3", "saving last.ckpt (MB)"]
        assert [task.description for task in display.tasks] == ["Epoch 3"] and not threads()
    assert "saving last.ckpt (MB) 1/4" in terminal.getvalue()


@pytest.mark.parametrize("own", [None, False])
def test_setting_up_saving_and_loading_are_waited_for(tmp_path, monkeypatch, own):
    """What is done is nothing at the begin and everything at the end; without ``progress`` nothing is shown."""
    seen = {}

    @contextmanager
    def waiting(what, total, done, shown=True, display=None):
        before = done()
        yield
        seen[what] = (before, done(), total, shown)

    monkeypatch.setattr(checkpoints, "waiting", waiting)
    callbacks = [] if own is None else [sp_lightning.SuperpipelineCallback(progress=own)]
    trainer = fit(callbacks, enable_progress_bar=True)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, models.loader(CASE, 1), ckpt_path=tmp_path / "end.ckpt")
    size = sum(p.nbytes for p in trainer.lightning_module.parameters())
    assert seen["superpipeline: weights into host memory"] == (0, size, size, own is None)
    assert seen["superpipeline: loading weights"] == (0, size, size, own is None)
    assert seen["superpipeline: saving end.ckpt"][2] >= size

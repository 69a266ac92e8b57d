"""Programs that are forks behave as programs do that Python starts."""

import signal
import subprocess

import forks
import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, returncode, stdout",
    [
        ("import atexit, sys; atexit.register(print, 'end'); print(*sys.argv[1:])", 0, "a b\nend\n"),
        ("import sys; sys.exit(3)", 3, ""),
        ("1 / 0", 1, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_a_program_has_its_arguments_and_ends_as_it_ends(code, returncode, stdout):
    done = forks.run(code, "a", "b")
    assert (done.returncode, done.stdout) == (returncode, stdout)
    assert ("ZeroDivisionError" in done.stderr) == (returncode == 1)


@pytest.mark.slow
def test_a_program_begins_with_what_was_imported_and_with_nothing_of_another_program():
    forks.run("import sys, tabnanny; sys.modules['sp_lightning'].mark = 1")
    code = "import sys; print('tabnanny' in sys.modules, hasattr(sys.modules['sp_lightning'], 'mark'), __name__)"
    assert forks.run(code).stdout == "False False __main__\n"


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run("import time; time.sleep(60)", timeout=0.1)

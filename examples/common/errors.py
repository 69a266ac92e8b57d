"""What a recipe says when what it was given can not be used."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

from sp_lightning.errors import OptionError, SuperpipelineError


class BadInput(SuperpipelineError, ValueError):
    """A file, a record or an argument that no training can start from; the message names it."""


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """End a script with one line and exit status 2, where it was given what it can not use."""
    try:
        yield
    except (BadInput, OptionError) as error:
        sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {' '.join(str(error).split())}\n")
        raise SystemExit(2) from error


def positive(text: str) -> int:
    """An argument of a script that counts something."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an int >= 1, got {text}")
    return int(text)

"""The commands of ``python -m sp_lightning`` beside LightningCLI's, one module each.

A module has ``add_arguments(parser)``, which imports nothing heavy, and ``main(args)``, which prints and returns an
exit status. Commands only translate: a library module, which can be called without them, makes what they print.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..options import check_writable

STDOUT = "-"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, with which a command prints everything as JSON, or writes it to a file beside its text."""
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE", help="write everything as JSON, or print it")


def write_json(found: dict[str, Any], place: str) -> None:
    """Write what a command found to a file, or print it."""
    import json

    text = json.dumps(found, indent=2) + "\n"
    if place == STDOUT:
        sys.stdout.write(text)
    else:
        Path(place).write_text(text)


def make_room(**paths: str | Path | None) -> None:
    """Make the folders of files that a command will write, by the names of their options, before any work."""
    for argument, path in paths.items():
        if path not in (None, STDOUT):
            if Path(path).is_dir():
                raise OptionError(argument=argument, found=str(path), allowed="a file, not a folder")
            check_writable(Path(path).parent, argument, path)
            Path(path).parent.mkdir(parents=True, exist_ok=True)

"""Write below each plan's command in disk.md what it prints.

    python docs/make_disk.py

The models' sizes are those of make_needs.py; their tokenizers and the data are stand-ins, which change only how many
steps there are.
"""

from __future__ import annotations

import os
import pathlib
import random
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import make_needs  # noqa: E402

PAGE = ROOT / "docs" / "disk.md"
PRINTED = re.compile(r"(?<=```text\n)(python -m sp_lightning (plan (?:.*\\\n)*.*))\n\n(?:[^`]*\n)?(?=```)")


def make_stand_ins() -> None:
    """Make the models, without weights, and the data that the commands name, in the current directory."""
    from examples.common import tiny

    random.seed(0)
    make_needs.llamas(tiny.tokenizer(tiny.sentences(200)))
    tiny.write_jsonl(pathlib.Path("my.jsonl"), tiny.chats(4000))
    pathlib.Path("examples").symlink_to(ROOT / "examples")


def printed(arguments: str) -> str:
    """Return what the command line prints for these arguments, without spaces at the ends of lines."""
    command = [sys.executable, "-m", "sp_lightning", *shlex.split(arguments.replace("\\\n", " "))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    return "\n".join(line.rstrip() for line in said.strip().splitlines())


def written(page: str, outputs: dict[str, str]) -> str:
    """Return the page with these outputs below the commands."""
    return PRINTED.sub(lambda match: f"{match[1]}\n\n{outputs[match[2]]}\n", page)


def outputs(page: str) -> dict[str, str]:
    """Plan all commands of the page."""
    with tempfile.TemporaryDirectory() as folder, make_needs.inside(folder):
        make_stand_ins()
        return {match[2]: printed(match[2]) for match in PRINTED.finditer(page)}


def main() -> None:
    """Write the outputs into the page."""
    page = PAGE.read_text()
    PAGE.write_text(written(page, outputs(page)))


if __name__ == "__main__":
    main()

"""The scripts of docs/several-devices.md run as the page says, on two ranks without a GPU."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "several-devices.md"
SCRIPTS = dict(re.findall(r"```py\n# (\S+\.py)(.*?)```", PAGE.read_text(), re.DOTALL))
COMMANDS = {
    "train.py": [sys.executable, "train.py"],
    "loop.py": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "loop.py"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_scripts_of_the_page_run(name, tmp_path):
    pathlib.Path(name).write_text("#" + SCRIPTS[name])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(COMMANDS[name], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_page_has_the_scripts():
    assert SCRIPTS.keys() == COMMANDS.keys()

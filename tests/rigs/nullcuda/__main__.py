"""Runs a script with torch's CUDA, without a GPU: `PYTHONPATH=tests/rigs python -m nullcuda [--late] SCRIPT`."""

import argparse
import os
import sys

from . import environment

parser = argparse.ArgumentParser(prog="python -m nullcuda", description=__doc__)
parser.add_argument("--numbers", action="store_true", help="the CPU's kernels run in the place of CUDA's")
parser.add_argument("--late", action="store_true", help="copies are done as late as CUDA may do them")
parser.add_argument("script", nargs=argparse.REMAINDER)
options = parser.parse_args()
os.execve(sys.executable, [sys.executable, *options.script], environment(options.numbers, options.late))

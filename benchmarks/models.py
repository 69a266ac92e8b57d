"""Train a small member of every model family plainly and streamed, compare all bits, and print the table of families.

    python benchmarks/models.py

The models are those of tests/rigs/families.py, on tests/rigs/simgpu with its race checker, with a window of one unit.
The exit status is 1 if any bit differs, or if the checker saw a race.
"""

import importlib
import pathlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "rigs"))

import families
import torch

from sp_lightning.stream.partition import FoundUnit, partition

HEAD = ["family", "units", "what is special", "parity"]


def kind(unit: FoundUnit) -> str:
    """Name the classes of a unit's modules."""
    return " and ".join(dict.fromkeys(type(module).__name__ for _, module in unit.modules))


def units(net: torch.nn.Module) -> str:
    """Name the units of a net, and count those of each kind."""
    found = partition(net, "auto")
    kinds = Counter("the rest, resident" if unit.resident else kind(unit) for unit in found)
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in kinds.items())


def rows() -> Iterator[list[str]]:
    """Yield the rows of all families."""
    for name, family in families.FAMILIES.items():
        torch.manual_seed(0)
        net = family.case.make()
        yield [name, units(net), family.special, parity(family)]


def parity(family: families.Family) -> str:
    """Compare one run with a window of one unit on the simulated accelerator, and describe the outcome."""
    simgpu, checks = importlib.import_module("simgpu"), importlib.import_module("parity")
    try:
        checks.check(family.case, {"window": 1}, accelerator="simgpu")
    except AssertionError as error:
        return f"**differs**: {error}".splitlines()[0]
    return "**a race**" if simgpu.races() else "bitwise"


def table(lines: Iterator[list[str]]) -> str:
    """Return the table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [HEAD, ["---"] * len(HEAD), *lines])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    text = table(rows())
    sys.stdout.write(text + "\n")
    sys.exit("**" in text)

"""What the source says of itself is so: the order of its files.

Each check takes a tree of files, and is tried on one in which it has something to find.
"""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "sp_lightning"


# ---- the order of files: docs/architecture.md lists them


def listed(root: pathlib.Path) -> list[str]:
    """The files of the package in the order of the page, by their paths in the package."""
    return re.findall(r"^\| `([\w/]+\.py)`", (root / "docs" / "architecture.md").read_text(), re.MULTILINE)


def faults_of_the_order(root: pathlib.Path) -> list[str]:
    """What the page's list and the files of the package do not agree on."""
    package, files = root / PACKAGE, listed(root)
    there = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    faults = [f"{name} is not listed" for name in sorted(there - {*files})]
    faults += [f"{name} is listed, but no file" for name in files if name not in there]
    faults += [f"{name} is listed again" for place, name in enumerate(files) if name in files[:place]]
    for place, name in enumerate(files):
        if name in there:
            below = imports(package, name) - {*files[:place]}
            faults += [f"{name} imports {other}, which is not above it" for other in sorted(below)]
    return faults


def imports(package: pathlib.Path, name: str) -> set[str]:
    """The files of a package from which one of them imports: anywhere in it, for type checkers too."""
    folder = pathlib.PurePosixPath(name).parent.parts
    found = set()
    for node in ast.walk(ast.parse((package / name).read_text())):
        if isinstance(node, ast.Import):
            paths = [alias.name.split(".") for alias in node.names]
            found |= {file_of(package, *path[1:]) or alone(path) for path in paths if path[0] == package.name}
        elif isinstance(node, ast.ImportFrom):
            path = node.module.split(".") if node.module else []
            if node.level:
                path = [package.name, *folder[: len(folder) + 1 - node.level], *path]
            if path[0] == package.name:
                of = file_of(package, *path[1:]) or alone(path)
                found |= {file_of(package, *path[1:], alias.name) or of for alias in node.names}
    return found


def file_of(package: pathlib.Path, *path: str) -> str | None:
    """The file of a module, by its path in the package."""
    names = "/".join([*path, "__init__.py"]), "/".join(path) + ".py"
    return next((name for name in names if (package / name).is_file()), None)


def alone(path: list[str]) -> str:
    return "/".join(path[1:]) + ".py"


def test_the_architecture_lists_every_file_once_and_files_import_only_from_files_above_them():
    assert len(listed(ROOT)) > 70 and faults_of_the_order(ROOT) == []


LISTED = ["errors.py", "memory/__init__.py", "memory/layout.py", "core.py", "__init__.py"]
TREE = {
    "errors.py": "import torch",
    "memory/__init__.py": "",
    "memory/layout.py": "from ..errors import Error",
    "core.py": "from sp_lightning.memory import layout\nfrom . import errors",
    "__init__.py": "from .core import Core",
}


def faults_of(tmp_path: pathlib.Path, files: list[str], **changed: str | None) -> list[str]:
    """Of a list of the tree's files, after a file was changed, added or taken away (None)."""
    write(tmp_path, {f"{PACKAGE}/{name}": text for name, text in {**TREE, **changed}.items() if text is not None})
    write(tmp_path, {"docs/architecture.md": "".join(f"| `{name}` | its noun |\n" for name in files)})
    return faults_of_the_order(tmp_path)


def write(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_tree_in_order_has_no_faults(tmp_path):
    assert faults_of(tmp_path, LISTED) == []


@pytest.mark.parametrize(
    "files, changed, said",
    [
        (LISTED[:1] + LISTED[2:], {}, "memory/__init__.py is not listed"),
        (LISTED, {"memory/units.py": ""}, "memory/units.py is not listed"),
        (LISTED, {"errors.py": None, "memory/layout.py": "", "core.py": ""}, "errors.py is listed, but no file"),
        ([*LISTED, "core.py"], {}, "core.py is listed again"),
    ],
)
def test_a_list_of_other_files_than_there_are_is_noticed(files, changed, said, tmp_path):
    assert faults_of(tmp_path, files, **changed) == [said]


@pytest.mark.parametrize(
    "line",
    [
        "from ..core import Core",
        "from .. import core",
        "from sp_lightning.core import Core",
        "from sp_lightning import core",
        "import sp_lightning.core",
        "def late():\n    from ..core import Core",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..core import Core",
    ],
)
def test_an_import_from_below_is_noticed_wherever_it_stands(line, tmp_path):
    said = ["memory/layout.py imports core.py, which is not above it"]
    assert faults_of(tmp_path, LISTED, **{"memory/layout.py": line}) == said


@pytest.mark.parametrize(
    "line, imported",
    [
        ("from . import layout", "memory/layout.py"),
        ("from .. import Core", "__init__.py"),
        ("from ..gone import Core", "gone.py"),
        ("import sp_lightning.gone.by", "gone/by.py"),
    ],
)
def test_an_import_from_a_package_itself_or_from_nowhere_is_noticed(line, imported, tmp_path):
    said = [f"memory/__init__.py imports {imported}, which is not above it"]
    assert faults_of(tmp_path, LISTED, **{"memory/__init__.py": line}) == said

"""What docs/architecture.md says of imports is so, and private names of others are in compat/ alone."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = "sp_lightning"


# ---- the order of packages: docs/architecture.md has a table of them


def packages(root: pathlib.Path) -> list[str]:
    """List the packages, and the modules at the top, in the order of the page's table."""
    text = (root / "docs" / "architecture.md").read_text()
    return [name.rstrip("/") for name in re.findall(r"^\| `(\w+(?:/|\.py))` \|", text, re.MULTILINE)]


def upward(root: pathlib.Path) -> list[str]:
    """List the imports of a package from one below it in the table, as far as both are in it."""
    order, faults = packages(root), []
    for path, names in imports(root).items():
        own = path.split("/")[0]
        for other in sorted(names):
            theirs = other.split("/")[0]
            if own in order and theirs in order and order.index(theirs) > order.index(own):
                faults.append(f"{path} imports {other}, whose package is not above it")
    return faults


def cycles(root: pathlib.Path) -> list[str]:
    """List the files that import each other, over others too."""
    left = imports(root)
    while free := [path for path, names in left.items() if not names & left.keys() - {path}]:
        for path in free:
            del left[path]
    return sorted(left)


def imports(root: pathlib.Path) -> dict[str, set[str]]:
    """Map each file of the package to the files from which it imports: anywhere in it, for type checkers too."""
    package = root / PACKAGE
    return {
        path.relative_to(package).as_posix(): imported(package, path)
        for path in sorted(package.rglob("*.py"))
        if path.name != "__init__.py"
    }


def imported(package: pathlib.Path, path: pathlib.Path) -> set[str]:
    folder, found = path.relative_to(package).parent.parts, set()
    for node in ast.walk(ast.parse(path.read_text())):
        places: list[list[str]] = []
        if isinstance(node, ast.Import):
            places = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = [package.name, *folder[: len(folder) + 1 - node.level], *base]
            places = [[*base, alias.name] for alias in node.names]
        for name, *place in places:
            for end in (len(place), len(place) - 1) if name == package.name else ():
                if end > 0 and (package / ("/".join(place[:end]) + ".py")).is_file():
                    found.add("/".join(place[:end]) + ".py")
                    break
    return found


def test_packages_import_from_those_above_them():
    assert len(packages(ROOT)) > 10 and upward(ROOT) == []


def test_no_files_import_each_other():
    assert cycles(ROOT) == []


LIGHTNINGS = ("lightning", "pytorch_lightning", "lightning_fabric")


def test_lightning_is_imported_by_either_name_in_one_place():
    found = {}
    for file in sorted((ROOT / PACKAGE / "lightning").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.split(".")[0] in LIGHTNINGS for name in named):
                found[file.name] = named
    assert list(found) == ["names.py"]
    assert [path.name for path in sorted((ROOT / PACKAGE / "pytorch_lightning").glob("*.py"))] == [
        "__init__.py",
        "names.py",
    ]


# ---- private names of others: compat/ has them

PUBLIC = {  # names with an underscore that are no more private than others
    *("_version", "_parameters", "_buffers"),  # of tensors and modules: torch's own documentation tells users of them
    *("_replace", "_fields", "_make", "_asdict"),  # of named tuples: Python's documentation does
    *("_no_split_modules", "_from_config", "_model_mapping"),  # of transformers: the models' files are made of them
}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}


def private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.startswith("__") and name not in PUBLIC


def own_names(trees: Iterable[ast.AST]) -> set[str]:
    """The names that the package defines: of functions, classes, variables, attributes of ``self`` and slots."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_names(root: pathlib.Path) -> list[str]:
    """Where a file outside of compat/ uses a private name that the package does not define itself, or one of torch's.

    An object's class is not known here: of an attribute that both have, it is taken to be the package's.
    """
    package = root / PACKAGE
    trees = {path.relative_to(root): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    own, faults = own_names(trees.values()), []
    for path, tree in trees.items():
        for node in ast.walk(tree) if path.parts[1] != "compat" else ():
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [part for alias in node.names for part in alias.name.split(".") if private(part)]
            elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] != PACKAGE:
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                chain = ast.unparse(node)
                operators = chain.startswith(("torch.ops.aten.", "aten."))  # named as in torch's list of operators
                if not operators and (node.attr not in own or chain.startswith("torch.")):
                    names = [node.attr]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
                texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                names = [name for text in texts for name in text.split(".") if name not in own]
            faults += [f"{path.as_posix()}:{node.lineno} {name}" for name in names if private(name)]
    return faults


def test_private_names_of_torch_and_lightning_are_in_compat():
    assert private_names(ROOT) == []

"""What the source says of itself is so: the order of its files, the rules that it cites, the files that it names.

Each check takes a tree of files, and is tried on one in which it has something to find.
"""

from __future__ import annotations

import ast
import functools
import io
import pathlib
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import pairwise

import pytest

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("sp_lightning", "tests", "benchmarks", "examples")
PACKAGE = "sp_lightning"
CODE = (".py", ".cpp", ".h")
PATH = r"[\w./-]*\w\.(?:py|cpp|h)\b"
OTHERS = ("zero_to_fp32.py",)  # DeepSpeed writes it beside a checkpoint
RULES = re.compile(rf"(?:({PATH}), )?\b[Rr]ules? (\d+(?:(?:,|,? and| or| to) \d+)*)")


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
    """The file of a module, by its path in the package; pytorch_lightning/ has the modules of lightning/ as well."""
    places = [path, ["lightning", *path[1:]]] if path[:1] == ("pytorch_lightning",) else [path]
    names = [name for place in places for name in ("/".join([*place, "__init__.py"]), "/".join(place) + ".py")]
    return next((name for name in names if (package / name).is_file()), None)


def alone(path: list[str]) -> str:
    return "/".join(path[1:]) + ".py"


LIGHTNINGS = ("lightning", "pytorch_lightning", "lightning_fabric")


def test_the_modules_that_run_under_both_names_of_lightning_import_it_from_one_place():
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


def test_the_architecture_lists_every_file_once_and_files_import_only_from_files_above_them():
    assert len(listed(ROOT)) > 70 and faults_of_the_order(ROOT) == []


def packages(files: Iterable[str]) -> list[str]:
    """The packages of files in their order, those at the top of the package by themselves."""
    return list(dict.fromkeys(file.split("/")[0] for file in files))


def faults_of_the_packages(root: pathlib.Path) -> list[str]:
    """Which packages the page does not list as one, and which hold more modules than can be seen at a glance."""
    files = listed(root)
    runs = [
        file.split("/")[0]
        for file, before in zip(files, ["", *files], strict=False)
        if file.split("/")[0] != before.split("/")[0]
    ]
    faults = [f"{name}/ is in two places" for name, count in Counter(runs).items() if count > 1]
    sizes = Counter(file.split("/")[0] for file in files if "/" in file and not file.endswith("__init__.py"))
    sizes["the top"] = sum("/" not in file for file in files)
    return faults + [f"{name} has {size} modules" for name, size in sizes.items() if size > most(name)]


def most(name: str) -> int:
    """How many modules a folder may have beside its ``__init__.py``."""
    return {"the top": 6, "compat": 11}.get(name, 10)


def test_packages_are_floors_of_at_most_ten_modules():
    order = packages(listed(ROOT))
    floors = "core compat memory autograd optim gradients runtime plan observe"
    floors += " lightning pytorch_lightning hf commands"
    assert [name for name in order if name in floors.split()] == floors.split()
    assert faults_of_the_packages(ROOT) == []


def test_a_package_in_two_places_and_one_too_wide_are_noticed(tmp_path):
    files = ["a/x.py", "b/x.py", "a/y.py", *(f"c/{number}.py" for number in range(11)), *(f"{n}.py" for n in "pqrstuv")]
    write(tmp_path, {"docs/architecture.md": "".join(f"| `{name}` | its noun |\n" for name in files)})
    assert faults_of_the_packages(tmp_path) == ["a/ is in two places", "c has 11 modules", "the top has 7 modules"]


# ---- one name, one class


NEW_CORE = ("host", "stream", "steps", "handle.py")  # counted by themselves while the core before them is there


def classes_of_one_name(root: pathlib.Path) -> list[str]:
    """The names that two classes of one core have, also one class inside of a function."""
    package = root / PACKAGE
    found = Counter(
        (node.name, path.relative_to(package).parts[0] in NEW_CORE)
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    return [name for (name, _), count in found.items() if count > 1]


def test_no_two_classes_have_one_name():
    assert classes_of_one_name(ROOT) == []


def test_a_second_class_of_a_name_is_noticed(tmp_path):
    write(tmp_path, {f"{PACKAGE}/a.py": "class A: ...\nclass B: ...", f"{PACKAGE}/b/c.py": "def f():\n  class B: ..."})
    assert classes_of_one_name(tmp_path) == ["B"]


# ---- one way for all runs: few places ask whether there are other ranks, a disk or files

ABSENT = {
    "team",
    "ranks",
    "group",
    "disk",
    "file",
    "files",
    "choice",
    "scratch",
    "host_budget",
    "uses_files",
    "spills",
    "is_on_disk",
}
MOST_FORKS = 30  # whoever leaves fewer lowers it: what may be absent has a null object, as `ranks/alone.py` is one


def forks(root: pathlib.Path) -> list[str]:
    """The places that test whether something of these names is there: for None, or for truth."""
    found = {
        (path.relative_to(root).as_posix(), leaf.lineno, leaf.col_offset, name)
        for path in sorted((root / PACKAGE).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        for leaf in operands(node)
        if (name := name_of(leaf).strip("_")) in ABSENT
    }
    return [f"{path}:{line}: {name}" for path, line, _, name in sorted(found)]


def operands(node: ast.AST) -> Iterator[ast.expr]:
    """The operands that this node compares with None, or takes for true or false."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
        if isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None:
            yield node.left
    elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs
    elif isinstance(node, ast.BoolOp):
        yield from node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand


def name_of(node: ast.expr) -> str:
    """The last name of a chain of attributes."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_few_places_ask_whether_there_are_other_ranks_a_disk_or_files():
    found = forks(ROOT)
    assert len(found) <= MOST_FORKS, "\n".join([str(len(found)), *found])


@pytest.mark.parametrize(
    "line, names",
    [
        ("if a.disk is not None: pass", ["disk"]),
        ("x = 1 if self._files is None and ranks else 2", ["files", "ranks"]),
        ("y = [d for d in e if not d.disk]", ["disk"]),
        ("assert team or other", ["team"]),
        ("if disk is other or disk == 3 or f(ranks): pass", []),
    ],
)
def test_a_fork_is_noticed(line, names, tmp_path):
    write(tmp_path, {f"{PACKAGE}/a.py": line})
    assert [found.split()[-1] for found in forks(tmp_path)] == names


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


@pytest.mark.parametrize(
    "line, names",
    [
        ("x = torch._C._has_storage(y)", ["_has_storage", "_C"]),
        ("import torch._dynamo.config", ["_dynamo"]),
        ("from torch._dynamo import config", ["_dynamo"]),
        ("from torch import _dynamo", ["_dynamo"]),
        ("from torch.utils._pytree import tree_leaves", ["_pytree"]),
        ("def late():\n    return tensor.untyped_storage()._cdata", ["_cdata"]),
        ("x = torch._own", ["_own"]),
        ("x = getattr(trainer, '_logger_connector', None)", ["_logger_connector"]),
        ("x = operator.attrgetter('fit_loop._data_fetcher')", ["_data_fetcher"]),
        ("x = module._parameters, p._version, span._replace(a=1), it._own, torch.ops.aten._grouped_mm", []),
        ("from sp_lightning.core import _own\nfrom .core import _own", []),
        ("x = self._own, getattr(self, '_own'), __name__, torch.__version__", []),
    ],
)
def test_a_private_name_outside_of_compat_is_noticed(line, names, tmp_path):
    files = {"core.py": "_own = 1", "compat/graph.py": "import torch._C", "late.py": line}
    write(tmp_path, {f"{PACKAGE}/{name}": text for name, text in files.items()})
    assert [fault.split()[1] for fault in private_names(tmp_path)] == names


# ---- rules that comments cite, and files that they name


@functools.cache
def texts(path: pathlib.Path) -> list[tuple[int, str]]:
    """What a file says beside its code, by line: docstrings and blocks of comments, each without its line breaks."""
    text = path.read_text()
    if path.suffix == ".md":
        parts = text.split("`")  # every second one is code: a path, or a command, which may name a file of the reader's
        said = [(1, "".join(part for number, part in enumerate(parts) if number % 2 == 0 or len(part.split()) == 1))]
    elif path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        said = [*docstrings(text), *blocks((at.start[0], at.string) for at in tokens if at.type == tokenize.COMMENT)]
    else:
        said = blocks((number, line) for number, line in enumerate(text.splitlines(), 1) if "//" in line)
    return [(line, " ".join(text.split())) for line, text in said]


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and (said := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, said


def blocks(comments: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Comments on lines that follow each other, as one."""
    block: list[str] = []
    for (line, said), (following, _) in pairwise([*comments, (-1, "")]):
        block.append(re.sub(r"^.*?(#|//)", "", said))
        if following != line + 1:
            yield line - len(block) + 1, " ".join(block)
            block = []


@functools.cache
def rules(path: pathlib.Path) -> list[int]:
    """The numbers of a file's rules: in its docstring, or in the comment that it begins with."""
    text = path.read_text()
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        said = re.sub(r"^// ?", "", re.match(r"(//.*\n)*", text).group(), flags=re.MULTILINE)
    numbers = [int(number) for number in re.findall(r"^(?:Rule )?(\d+)(?:\.|  ) *\S", said, re.MULTILINE)]
    return numbers if numbers[:1] == [1] else []


def cited(text: str) -> Iterator[tuple[str, list[int]]]:
    """The rules that a text cites, with the file that it says they are in: "" for its own."""
    for file, numbers in RULES.findall(text):
        found = [int(number) for number in re.findall(r"\d+", numbers)]
        yield file, list(range(found[0], found[-1] + 1)) if " to " in numbers else found


def meant(root: pathlib.Path, by: pathlib.Path, name: str) -> list[pathlib.Path]:
    """The files that a name in another one may mean: that in the nearest folder above, or in the package's; or else all
    whose paths end so in the same folder of the root, or in the package."""
    nearest = [folder / name for folder in by.parents if folder.is_relative_to(root)]
    for path in (*nearest, root / PACKAGE / name):
        if path.is_file():
            return [path]
    for folder in (by.relative_to(root).parts[0], PACKAGE):
        found = [path for path in (root / folder).rglob(pathlib.Path(name).name) if path.match(name)]
        if found := [path for path in found if of_new_core(root, path) == of_new_core(root, by)] or found:
            return found
    return []


def of_new_core(root: pathlib.Path, path: pathlib.Path) -> bool:
    """Whether a file is of the core that is being built, where some files have names of files of the core before."""
    parts = path.relative_to(root).parts
    return parts[0] == PACKAGE and parts[1] in NEW_CORE


def is_of_torch_or_lightning(name: str) -> bool:
    """Whether this is the path of a file of theirs."""
    package, _, path = name.partition("/")
    if package not in ("torch", "lightning"):
        return False
    return any(pathlib.Path(folder, path).is_file() for folder in find_spec(package).submodule_search_locations)


def citing(root: pathlib.Path) -> list[pathlib.Path]:
    """The files that may cite rules: code, and the pages."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in (*CODE, ".md")]
    return sorted([*found, *root.glob("*.md"), *(root / "docs").glob("*.md")])


def dangling(root: pathlib.Path) -> list[str]:
    """What is cited and not there: rules, and files of Python."""
    faults = []
    for path in citing(root):
        name = path.relative_to(root).as_posix()
        for line, text in texts(path):
            for file in re.findall(PATH, text):
                found = meant(root, path, file)
                if (
                    len(found) != 1
                    and file.endswith(".py")
                    and file not in OTHERS
                    and not is_of_torch_or_lightning(file)
                ):
                    which = " or ".join(sorted(it.relative_to(root).as_posix() for it in found)) or "no file"
                    faults.append(f"{name}:{line} names {file}, which is {which}")
            for file, numbers in cited(text):
                of = meant(root, path, file) if file else [path] if path.suffix in CODE else []
                missing = [number for number in numbers if any(number not in rules(it) for it in of)]
                if missing or not of:
                    faults.append(f"{name}:{line} cites {missing or numbers} of {file or 'its own rules'}")
    return faults


def misnumbered(root: pathlib.Path) -> list[str]:
    """The files whose rules are not numbered one by one."""
    files = [path for path in citing(root) if path.suffix in CODE]
    return [str(path) for path in files if rules(path) != list(range(1, len(rules(path)) + 1))]


def test_every_rule_and_every_file_that_is_cited_is_there():
    assert dangling(ROOT) == []


def test_rules_are_numbered_one_by_one():
    assert misnumbered(ROOT) == []


def test_the_rules_that_are_cited_are_found():
    """Else all of them would be there."""
    counts = Counter()
    for path in citing(ROOT):
        for _, text in texts(path):
            counts[path.relative_to(ROOT).parts[0]] += len(list(cited(text)))
            counts["of another file"] += sum(bool(file) for file, _ in cited(text))
            counts["files"] += len(re.findall(PATH, text))
    assert counts["sp_lightning"] > 150 and counts["of another file"] > 20 and counts["tests"] > 10, counts
    assert counts["files"] > 200, counts


RULED = {
    "sp_lightning/core.py": '"""A core.\n\n1. One thing.\n2. Another,\n   and more (memory/store.py, Rule 1).\n"""\n',
    "sp_lightning/memory/store.py": '"""A store.\n\nRule 1  A thing.\n        10. is no rule.\n"""\n',
    "tests/csrc/state.h": "// State.\n//\n// 1. A thing.\n// 2. Another.\n#pragma once\n",
}


@pytest.mark.parametrize(
    "name, text",
    [
        ("sp_lightning/core.py", '"""A core.\n\n1. One thing.\n"""\n\n\ndef do():\n    """Do it (Rule 1)."""\n'),
        ("sp_lightning/engine.py", "go()  # core.py, Rules 1 and 2; store.py,\n      # Rule 1\n"),
        ("sp_lightning/memory/layout.py", "# as core.py says, and store.py, and memory/store.py\n"),
        ("sp_lightning/engine.py", "# as torch/utils/checkpoint.py and lightning/pytorch/callbacks/timer.py do\n"),
        ("sp_lightning/engine.py", 'SAID = "Rule 9 of gone.py"\n'),
        ("tests/csrc/runtime.cpp", "go();  // state.h, Rule 2\n"),
        ("tests/test_core.py", "# core.py, Rule 2; csrc/state.h, Rules 1 to 2\n"),
        ("docs/page.md", "See `core.py`, Rule 2, and run `python your_file.py`.\n"),
    ],
)
def test_what_is_there_may_be_cited(name, text, tmp_path):
    write(tmp_path, {**RULED, name: text})
    assert dangling(tmp_path) == misnumbered(tmp_path) == []


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("sp_lightning/engine.py", "# Rule 1\n", "1 cites [1] of its own rules"),
        ("sp_lightning/core.py", '"""A core.\n\n1. One thing (Rule 2).\n"""\n', "1 cites [2] of its own rules"),
        ("sp_lightning/engine.py", "go()  # (core.py, Rules 1, 2 and 5)\n", "1 cites [5] of core.py"),
        ("sp_lightning/engine.py", "# (core.py, Rules 1 to 4)\n", "1 cites [3, 4] of core.py"),
        ("sp_lightning/engine.py", "def go():\n    # (store.py,\n    # Rule 2)\n    pass\n", "2 cites [2] of store.py"),
        ("sp_lightning/engine.py", 'class It:\n    """Goes (rule 3)."""\n', "2 cites [3] of its own rules"),
        ("sp_lightning/engine.py", "# as memory/layout.py does\n", "1 names memory/layout.py, which is no file"),
        ("sp_lightning/engine.py", "# as torch/gone.py does\n", "1 names torch/gone.py, which is no file"),
        ("sp_lightning/engine.py", "# as checkpoint.py does\n", "1 names checkpoint.py, which is no file"),
        ("tests/csrc/runtime.cpp", "\ngo();  // Rule 2\n", "2 cites [2] of its own rules"),
        ("tests/test_core.py", "# core.py, Rule 3\n", "1 cites [3] of core.py"),
        ("docs/page.md", "See `core.py`, Rule 3.\n", "1 cites [3] of core.py"),
        ("docs/page.md", "See `gone.py`.\n", "1 names gone.py, which is no file"),
    ],
)
def test_what_is_not_there_is_noticed_where_it_is_cited(name, text, said, tmp_path):
    write(tmp_path, {**RULED, name: text})
    assert [fault for fault in dangling(tmp_path) if fault.startswith(name)] == [f"{name}:{said}"]


def test_a_rule_of_a_file_that_moved_is_noticed(tmp_path):
    write(tmp_path, RULED)
    (tmp_path / "sp_lightning/memory/store.py").rename(tmp_path / "sp_lightning/memory/unit_store.py")
    said = ["names memory/store.py, which is no file", "cites [1] of memory/store.py"]
    assert dangling(tmp_path) == [f"sp_lightning/core.py:1 {what}" for what in said]


def test_a_name_that_two_files_of_sub_packages_have_is_noticed(tmp_path):
    write(tmp_path, {**RULED, "sp_lightning/runtime/store.py": "", "sp_lightning/engine.py": "# as store.py does\n"})
    both = "sp_lightning/memory/store.py or sp_lightning/runtime/store.py"
    assert dangling(tmp_path) == [f"sp_lightning/engine.py:1 names store.py, which is {both}"]


def test_a_rule_that_is_taken_out_without_the_others_moving_up_is_noticed(tmp_path):
    write(tmp_path, {**RULED, "sp_lightning/core.py": '"""A core.\n\n1. One thing.\n3. Another.\n"""\n'})
    assert misnumbered(tmp_path) == [str(tmp_path / "sp_lightning/core.py")]


# ---- docstrings are read alone, in a hover: the first line names a thing, and numbers have names

VAGUE = re.compile(r"(?:It|Its|Of|They|Their|That|Those|These|What|Who|He|His)\b")
PUZZLING = ("so many", "can not", "withheld")


def vague_docstrings(root: pathlib.Path) -> list[str]:
    """The docstrings of a package that begin with a pronoun, or count things without a number."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if VAGUE.match(text) or any(words in text for words in PUZZLING):
                    place = path.relative_to(root).as_posix()
                    found.append(f"{place}: {text.splitlines()[0]}")
    return found


def test_docstrings_name_what_they_are_about():
    assert vague_docstrings(ROOT) == []


@pytest.mark.parametrize(
    "text, is_vague",
    [
        ("It ends.", True),
        ("Of a unit: its bytes.", True),
        ("What reads find now.", True),
        ("Allocate so many bytes.", True),
        ("Return the items of a ring.", False),
        ("Iterate over units.", False),
    ],
)
def test_a_docstring_without_a_subject_is_noticed(text, is_vague, tmp_path):
    write(tmp_path, {f"{PACKAGE}/memory/ring.py": f'def ring():\n    """{text}"""\n'})
    assert bool(vague_docstrings(tmp_path)) is is_vague

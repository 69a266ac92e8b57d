"""What the source says of itself is so: which package may import which, and that the files that it names are there.

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

import pytest

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("sp_lightning", "benchmarks", "examples")
PACKAGE = "sp_lightning"
CODE = (".py", ".cpp", ".h")
PATH = r"[\w./-]*\w\.(?:py|cpp|h)\b"
OTHERS = ("zero_to_fp32.py",)  # DeepSpeed writes it beside a checkpoint


# ---- the order of packages: docs/architecture.md has a table of them


def packages(root: pathlib.Path) -> list[str]:
    """List the packages, and the modules at the top, in the order of the page's table."""
    text = (root / "docs" / "architecture.md").read_text()
    return [name.rstrip("/") for name in re.findall(r"^\| `(\w+(?:/|\.py))` \|", text, re.MULTILINE)]


def core(root: pathlib.Path) -> list[str]:
    """List the packages of the table down to handle.py, which every door uses."""
    order = packages(root)
    return order[: order.index("handle.py") + 1]


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


TABLE = "| `errors.py` | types |\n| `low/` | bytes |\n| `handle.py` | all |\n| `high/` | doors |\n"


@pytest.mark.parametrize(
    "line",
    [
        "from ..high.door import Door",
        "from ..high import door",
        "from sp_lightning.high import door",
        "import sp_lightning.high.door",
        "def late():\n    from ..high.door import Door",
    ],
)
def test_an_import_from_below_is_noticed_wherever_it_stands(line, tmp_path):
    files = {"high/door.py": "from ..low.unit import Unit\nfrom ..errors import Error", "errors.py": "import torch"}
    write(tmp_path, {"docs/architecture.md": TABLE, f"{PACKAGE}/low/unit.py": line})
    write(tmp_path, {f"{PACKAGE}/{name}": text for name, text in files.items()})
    assert upward(tmp_path) == ["low/unit.py imports high/door.py, whose package is not above it"]
    assert cycles(tmp_path) == ["high/door.py", "low/unit.py"]


def write(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


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


# ---- one name, one class


def classes_of_one_name(root: pathlib.Path) -> list[str]:
    """The names that two classes of one package of the core have, also one class inside of a function."""
    package, order = root / PACKAGE, core(root)
    found = Counter(
        (name, node.name)
        for path in sorted(package.rglob("*.py"))
        if (name := path.relative_to(package).parts[0]) in order
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    return [name for (_, name), count in found.items() if count > 1]


def test_no_two_classes_of_a_package_have_one_name():
    assert classes_of_one_name(ROOT) == []


def test_a_second_class_of_a_name_is_noticed(tmp_path):
    files = {
        "low/b.py": "class A: ...\nclass B: ...",
        "low/c.py": "def f():\n  class B: ...",
        "errors.py": "class A: ...",
    }
    write(tmp_path, {"docs/architecture.md": TABLE, **{f"{PACKAGE}/{name}": text for name, text in files.items()}})
    assert classes_of_one_name(tmp_path) == ["B"]


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


# ---- files that comments and pages name, and numbered rules


@functools.cache
def texts(path: pathlib.Path) -> list[tuple[int, str]]:
    """What a file says beside its code, by line: docstrings and blocks of comments, each without its line breaks."""
    text = path.read_text()
    if path.suffix == ".md":
        parts = text.split("`")  # every second one is code: a path, or a command, which may name a file of the reader's
        said = [(1, "".join(part for number, part in enumerate(parts) if number % 2 == 0 or len(part.split()) == 1))]
    elif path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = ((at.start[0], at.string) for at in tokens if at.type == tokenize.COMMENT)
        said = [*docstrings(text), *comments]
    else:
        said = [(number, line) for number, line in enumerate(text.splitlines(), 1) if "//" in line]
    return [(line, " ".join(text.split())) for line, text in said]


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and (said := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, said


def meant(root: pathlib.Path, by: pathlib.Path, name: str) -> list[pathlib.Path]:
    """The files that a name in another one may mean: that in the nearest folder above, or in the package; or else all
    whose paths end so in the same folder of the root, or in the package."""
    nearest = [folder / name for folder in by.parents if folder.is_relative_to(root)]
    for path in (*nearest, root / PACKAGE / name):
        if path.is_file():
            return [path]
    for folder in (by.relative_to(root).parts[0], PACKAGE):
        if found := [path for path in (root / folder).rglob(pathlib.Path(name).name) if path.match(name)]:
            return found
    return []


def is_of_torch_or_lightning(name: str) -> bool:
    """Whether this is the path of a file of theirs."""
    package, _, path = name.partition("/")
    if package not in ("torch", "lightning"):
        return False
    return any(pathlib.Path(folder, path).is_file() for folder in find_spec(package).submodule_search_locations)


def citing(root: pathlib.Path) -> list[pathlib.Path]:
    """The files that may name files: code, and the pages."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in (*CODE, ".md")]
    return sorted([*found, *root.glob("*.md"), *(root / "docs").glob("*.md")])


def missing(root: pathlib.Path) -> list[str]:
    """List the files of Python that are named and not there."""
    faults = []
    for path in citing(root):
        for line, text in texts(path):
            for file in re.findall(PATH, text):
                known = file in OTHERS or not file.endswith(".py") or is_of_torch_or_lightning(file)
                if not known and not meant(root, path, file):
                    faults.append(f"{path.relative_to(root).as_posix()}:{line} names {file}, which is no file")
    return faults


def test_every_file_that_is_named_is_there():
    assert missing(ROOT) == []


@pytest.mark.parametrize(
    "name, text, is_there",
    [
        ("sp_lightning/low/unit.py", "# as ring.py says, and low/ring.py\n", True),
        ("sp_lightning/high/door.py", "# as torch/utils/checkpoint.py does\n", True),
        ("sp_lightning/high/door.py", 'SAID = "gone.py"\n', True),
        ("docs/page.md", "See `ring.py`, and run `python your_file.py`.\n", True),
        ("sp_lightning/high/door.py", '"""Opens (low/gone.py)."""\n', False),
        ("sp_lightning/high/door.py", "# as torch/gone.py does\n", False),
        ("docs/page.md", "See `gone.py`.\n", False),
    ],
)
def test_a_file_that_is_not_there_is_noticed_where_it_is_named(name, text, is_there, tmp_path):
    write(tmp_path, {"sp_lightning/low/ring.py": '"""A ring."""\n', name: text})
    assert (missing(tmp_path) == []) is is_there


NUMBERED = re.compile(r"(?m)^\s*(?:Rule )?(\d{1,2})[.) ] +[A-Z]")
CITES = re.compile(r"\b[\w/]+\.py`?, [Rr]ules? \d")


def ruled(root: pathlib.Path) -> list[str]:
    """List the files of the core with more than five numbered rules, and citations of rules of another file."""
    faults = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = path.relative_to(root / PACKAGE).as_posix()
        if name.split("/")[0] in core(root):
            text = path.read_text()
            faults += (
                [f"{name} has more than five rules"]
                if len(NUMBERED.findall(ast.get_docstring(ast.parse(text)) or "")) > 5
                else []
            )
            faults += [
                f"{name}:{line} cites a rule of another file" for line, said in texts(path) if CITES.search(said)
            ]
    return faults


def test_few_rules_are_numbered_and_none_is_cited_elsewhere():
    assert ruled(ROOT) == []


def test_many_rules_and_a_citation_are_noticed(tmp_path):
    rules = "".join(f"{number}. A rule.\n" for number in range(1, 7))
    files = {
        "errors.py": f'"""Rules.\n\n{rules}"""\n',
        "low/unit.py": "go()  # errors.py, Rule 2\n",
        "old/x.py": f'"""A.\n\n{rules}"""\n',
    }
    write(tmp_path, {"docs/architecture.md": TABLE, **{f"{PACKAGE}/{name}": text for name, text in files.items()}})
    assert ruled(tmp_path) == ["errors.py has more than five rules", "low/unit.py:1 cites a rule of another file"]


# ---- helpers of tests


def unused_helpers(root: pathlib.Path) -> list[str]:
    """List the files in tests/rigs that no other file of the project imports, runs or names."""
    texts = {path: path.read_text() for name in ("tests", "benchmarks") for path in (root / name).rglob("*.py")}
    found = []
    for path in sorted((root / "tests" / "rigs").glob("*.py")):
        used = re.compile(
            rf"(?:import|from) {path.stem}\b|\b{path.stem}\.py\b|import .*\b{path.stem}\b|\"{path.stem}\""
        )
        others = (text for other, text in texts.items() if other != path)
        if not path.name.startswith("test_") and not any(used.search(text) for text in others):
            found.append(path.name)
    return found


def test_every_helper_of_tests_is_used():
    assert unused_helpers(ROOT) == []


def test_a_helper_that_nothing_uses_is_noticed(tmp_path):
    files = {"rigs/nets.py": "", "rigs/left.py": "import nets", "test_it.py": "from nets import Net"}
    write(tmp_path, {f"tests/{name}": text for name, text in files.items()})
    assert unused_helpers(tmp_path) == ["left.py"]


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

"""What the documents say is there: their code runs, their links lead somewhere, the messages they quote exist."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import forks
import lightning as L
import pytest
import torch

import models
from sp_lightning import errors, handle

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
IN_CI = ("python3 -m venv", "pip install", "pytest", ".ci/run")  # which .ci/run runs, or which run this
LAUNCHERS = ("torchrun ", "accelerate launch ")  # which tests/hf/test_hf_ranks.py runs
LONG = {  # for users with time; what else runs each of them
    "python benchmarks/models.py": "test_families.py",
    "python benchmarks/telemetry.py --width 256 --rounds 30": "test_recorder.py, without timing it",
}


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def commands() -> list[str]:
    lines = [
        line for page in PAGES for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    return sorted({line.split("  #")[0].strip() for line in lines} - {""})


def side(difference: str, sign: str) -> str:
    """The code before ("-") or after ("+") a difference."""
    return "".join(line[1:] or line for line in difference.splitlines(True) if line[0] in (" ", "\n", sign))


def python(page: pathlib.Path) -> str:
    """What a page shows, of differences what comes after."""
    found = BLOCK.findall(page.read_text())
    return "\n".join(side(text, "+") if name == "diff" else text for name, text in found if name in ("python", "diff"))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if python(page)], ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, docs_world):
    exec(compile(python(page), str(page), "exec"), docs_world)


def test_the_difference_to_a_plain_trainer_is_none_in_the_result(docs_world):
    (difference,) = blocks(ROOT / "README.md", "diff")
    plain, streamed = side(difference, "-"), side(difference, "+")
    assert len(streamed.splitlines()) == 9 and "superpipeline" not in plain
    results = []
    for code in (plain, streamed):
        torch.manual_seed(0)
        exec(code, world := dict(docs_world))
        results.append((type(world["trainer"].strategy).__name__, world["trainer"].lightning_module.state_dict()))
    (_, expected), (name, trained) = results
    assert name == "SuperpipelineStrategy" and all(torch.equal(trained[key], expected[key]) for key in expected)


def test_three_lines_in_another_projects_config_set_the_strategy(docs_world, monkeypatch):
    """lightning.md shows them."""
    pytest.importorskip("jsonargparse")
    import yaml

    (lines,) = blocks(ROOT / "docs" / "lightning.md", "yaml")
    config = yaml.safe_load(lines)
    assert len(lines.splitlines()) == 4  # the first is the one that a config has
    pathlib.Path("config.yaml").write_text(lines + "  accelerator: cpu\n")
    monkeypatch.setattr(sys, "argv", ["main.py", "--config", "config.yaml"])
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    cli = LightningCLI(BoringModel, run=False, save_config_callback=None)
    assert vars(cli.trainer.strategy.options).items() >= config["trainer"]["strategy"]["init_args"].items()


@pytest.fixture
def docs_world(tmp_path, monkeypatch):
    """The names that the pages take for granted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(L, "Trainer", functools.partial(L.Trainer, max_steps=2, enable_progress_bar=False))
    case = models.case("mlp")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, device=None: self)  # a page's "cuda" is the device there is
    monkeypatch.setattr(handle, "Device", on_cpu(handle.Device))
    return {
        "MyLightningModule": lambda: models.ZooModule(case),
        "loader": models.loader(case, 2),
        "model": case.make(),
        "make_hf_trainer": hf_trainer,
        "__name__": "docs",
    }


def hf_trainer():
    """One of transformers, of a tiny model."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import hf_runs

    arguments = transformers.TrainingArguments("out", max_steps=2, report_to=[], save_strategy="no")
    return transformers.Trainer(hf_runs.llama(), arguments, train_dataset=hf_runs.rows(8))


def on_cpu(device):
    return lambda name, *args, **kwargs: device("cpu", *args, **kwargs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_headings(page):
    links = re.findall(r"\]\(([^)#:]*\.md)?#([^)]*)\)", page.read_text())
    assert [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)] == []


# --- Errors


def errors_of_the_page() -> list[list[str]]:
    """Rows of the table of errors: message, type, what to do."""
    table = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Errors\n")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip("`") for cell in row[:2]] + row[2:] for row in rows]


@functools.cache
def texts_of_the_code() -> dict[str, str]:
    """Every text that the package may say, with a gap for each value, and the file that says it."""
    found = {}
    for path in (ROOT / "sp_lightning").rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found["".join(parts)] = source
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.setdefault(node.value, source)
    return found


def says(error: str, kind: str) -> bool:
    """Whether a file that names this type of errors has this message."""
    pattern = re.compile(".*".join(map(re.escape, error.split("..."))), re.DOTALL)
    return any(kind in source and pattern.search(text) for text, source in texts_of_the_code().items())


def test_each_error_of_the_page_is_one_of_the_code():
    rows = errors_of_the_page()
    assert 30 < len(rows) <= 50 and all(len(row) == 3 for row in rows)
    assert [error for error, kind, _ in rows if error != kind and not says(error, kind)] == []


def test_the_page_has_each_type_of_error():
    named = {kind for _, kind, _ in errors_of_the_page()}
    types_of_errors = {name for name, kind in vars(errors).items() if isinstance(kind, type)} - {"Any", "Iterable"}
    assert types_of_errors - named == {"SuperpipelineError"}
    assert named - types_of_errors == {"DeviceMemoryError"}


def test_the_names_in_the_architecture_are_those_of_the_code():
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.M | re.S)
    named = re.findall(r"`(_?[A-Za-z]\w*(?:\.\w+)*)(?:\([^`]*\))?`", text)
    code = " ".join(path.read_text() for path in (ROOT / "sp_lightning").rglob("*.py"))
    words = {*re.findall(r"\w+", code)}
    left = {name for name in named if not name.endswith(".py") and name.rpartition(".")[2] not in words}
    assert len(named) > 60 and left == set()


# --- Commands


def test_every_command_of_the_docs_is_one_that_something_runs():
    known = ("python ", *LAUNCHERS, *IN_CI)
    assert not [line for line in commands() if not line.startswith(known) and "pip install" not in line]


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("python ") and line not in LONG])
def test_a_command_of_the_docs_runs(command, tmp_path):
    recipe = "-m examples." in command or "examples/" in command.replace("examples/quickstart.py", "")
    if "my_package" in command or "FILE" in command or recipe:
        pytest.skip("names the user's own files, or is a recipe, which test_recipes.py runs")
    arguments = [sys.executable, *shlex.split(command)[1:]]
    arguments = [str(ROOT / word) if (ROOT / word).exists() and "/" in word else word for word in arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(arguments, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_list_of_pages_has_all_of_them():
    listed = re.findall(r"^\| \[(\S+)\]\(\1\) \|", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


LONGEST = {"exactness": 1_000, "architecture": 2_500, "disk": 1_200, "recipes": 1_200, "inference": 900, "*": 20_000}


@pytest.mark.parametrize("page, most", LONGEST.items())
def test_a_page_has_at_most_so_many_words(page, most):
    assert sum(len(path.read_text().split()) for path in (ROOT / "docs").glob(f"{page}.md")) <= most


def script(name: str):
    """A script of the docs, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_docstrings_say():
    make_api = script("make_api")
    assert (ROOT / "docs" / "api.md").read_text() == make_api.page()  # else run: python docs/make_api.py


# --- What the site makes of them


def test_the_sites_home_is_the_readme_and_names_pages_by_title():
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="README.md"))
    home = script("site_hooks").on_page_markdown("", page)
    assert home.startswith("# sp-lightning\n") and "[What fits where](what-fits.md)" in home
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", home)
    assert not [link for link in links if "://" not in link and not (ROOT / "docs" / link).exists()]
    assert "[All pages](#all-pages)" in home and "\n## All pages\n" in home


# What fits where


def test_the_readme_is_read_in_two_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    assert sum(map(len, map(str.split, readme_sentences()))) <= 600


def readme_prose() -> str:
    """What README says outside of code, tables, pictures, comments and headings; links by their text."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"^```.*?^```|<!--.*?-->|^\|.*?$|^#.*?$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "\n", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def readme_sentences() -> list[str]:
    paragraphs = re.split(r"\n\s*\n|\n- ", re.sub(r"`[^`]*`", "code", readme_prose()))
    return [sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.?!])\s+", paragraph)]


def measured() -> set[str]:
    """The figures of the result files, as README writes them."""
    exact = (ROOT / "benchmarks" / "results").glob("exact-*.json")
    runs = [run["difference"] for file in exact for run in json.loads(file.read_text())["results"]]
    figures = {f"{len(runs) - runs.count(None)} of {len(runs)} compared"}
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        for result in json.loads(file.read_text())["results"]:
            tokens = re.search(r"(\d+) tokens", result.get("label", ""))
            figures |= {f"{int(tokens[1]):,} tokens"} if tokens else set()
            for row in result.get("rows", ()):
                figures |= {f"{row['step_s']['median']:.2f} s"} if row.get("step_s") else set()
                peaks = row.get("device_peak"), row.get("host_peak")
                figures |= {f"{peak / 2**30:.1f} GiB" for peak in peaks if peak}
    return figures


def figures_in(text: str) -> set[str]:
    """Numbers with a unit."""
    units = "s|ms|GiB|GB|tokens|hours|h|%|x|of \\d+ compared"
    return set(re.findall(rf"\d[\d,.]*\s(?:{units})(?!\w)", re.sub(r"\s+", " ", text)))


def test_every_figure_of_the_readme_is_in_a_result_file():
    """Those below "What fits" are of the planner, whose command stands beside them."""
    before, rest = readme_prose().split("**Planned, not measured**")
    after = rest.partition("Plan your own")[2]
    found = figures_in(before + after)
    assert len(found) > 10 and found - measured() == set()
    assert {"1.03 s", "17.4 GiB", "8,192 tokens"} <= found


def test_the_chart_of_the_readme_is_drawn_from_a_result_file():
    charts = script("make_charts")
    drawn = charts.bars(charts.result())
    assert [f"{bar.seconds:.2f} s" for bar in drawn] == ["1.03 s", "2.27 s", "5.63 s"]
    assert charts.CHART.read_text() == charts.chart(charts.result())  # else run: python docs/make_charts.py


def test_the_chart_of_windows_is_drawn_from_its_file():
    charts = script("make_charts")
    found = json.loads(charts.PLANNED.read_text())
    assert [(row["window"], row["transfer"]) for row in found["rows"]] == list(charts.SIZES)
    assert charts.TRADEOFF.read_text() == charts.tradeoff(found)  # else run: python docs/make_charts.py
    command = f"python -m sp_lightning plan {' '.join(f'--{name} {value}' for name, value in charts.RUN.items())}"
    assert found["run"] == charts.RUN and command in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_chart_of_windows_is_what_the_planner_says():
    pytest.importorskip("transformers")
    charts = script("make_charts")
    found = json.loads(charts.PLANNED.read_text())["rows"]
    some = slice(0, None, 2)
    assert charts.planned(charts.SIZES[some]) == found[some]  # else run: python docs/make_charts.py --plan


@pytest.mark.slow
def test_the_table_of_what_fits_is_what_the_planner_says():
    make_fits = script("make_fits")
    for page, table in zip((make_fits.PAGE, make_fits.README), make_fits.tables(), strict=True):
        assert make_fits.written(page.read_text(), table) == page.read_text()  # else run: python docs/make_fits.py


# What the recipes for a disk print


@pytest.mark.slow
def test_the_recipes_for_a_disk_show_what_the_planner_prints():
    pytest.importorskip("peft")
    make_disk = script("make_disk")
    page = make_disk.PAGE.read_text()
    assert make_disk.written(page, make_disk.outputs(page)) == page  # else run: python docs/make_disk.py


NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))


def cells_of(notebook):
    """The code of its cells, in their order."""
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_output(notebook):
    assert not [cell for cell in cells_of(notebook) if cell["outputs"] or cell["execution_count"]]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(notebook):
    code = "\n\n".join("".join(cell["source"]) for cell in cells_of(notebook))
    done = forks.run(code, env={**os.environ, "MPLBACKEND": "agg"})
    assert done.returncode == 0, done.stderr
    assert pathlib.Path("timeline", "trace.json").exists() and "streamed" in done.stdout
    pictures = [pathlib.Path("memory.png"), pathlib.Path("timeline", "timeline.png")]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)

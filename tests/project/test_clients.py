"""docs/works-with.md has the clients of benchmarks/clients, each of which has the plain run's bits."""

from __future__ import annotations

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "works-with.md"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("clients.run")


def test_the_page_has_a_row_for_each_client_and_none_differs(script):
    text = PAGE.read_text()
    table = text[text.index(script.BEGIN) : text.index(script.END)]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    written = [(row[0], row[2].split()[0], *row[3:5]) for row in rows]
    packages = {"fabric": "Fabric"}
    assert written == [
        (client.library, packages.get(client.package, client.package), client.passed, client.needs)
        for client in script.CLIENTS.values()
    ]
    assert len(rows) >= 8 and all(re.fullmatch(r"same bits: \d+ losses, \d+ results", row[5]) for row in rows)

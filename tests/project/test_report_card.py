"""benchmarks/report_card.py, in small on the CPU: a report is whole, and the issue form takes it."""

import importlib.util
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def report_card(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("report_card", ROOT / "benchmarks" / "report_card.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return module


def test_a_report_is_made_in_small_on_the_cpu(report_card, monkeypatch, tmp_path, capsys):
    file = tmp_path / "card.json"
    monkeypatch.setattr(sys, "argv", ["report_card.py", "--device", "cpu", "--tiny", "--json", str(file)])
    report_card.main()
    made = json.loads(file.read_text())
    assert made["tiny"] and made["facts"]["versions"].keys() == {"sp-lightning", "torch", "lightning"}
    assert len(made["exactness"]) == 3
    assert all(found.endswith("compared, 0 differ") for found in made["exactness"].values())
    assert len(made["rates"]) == 6 and min(made["rates"].values()) > 0
    assert made["clipped step"]["seconds"] > 0 and made["plan"]["seconds"] > 0
    assert "| clipped step: seconds | " in capsys.readouterr().out


def test_a_difference_of_one_bit_is_counted(report_card, monkeypatch):
    trained = report_card.trained

    def off(device, sizes, streamed):
        found = trained(device, sizes, streamed)
        if streamed:
            found[-1].view(report_card.torch.int32)[0] += 1
        return found

    monkeypatch.setattr(report_card, "trained", off)
    found = report_card.exactness(report_card.torch.device("cpu"), tiny=True)
    assert all(line.endswith("compared, 1 differ") for line in found.values())

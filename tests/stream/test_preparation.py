"""A budget that does not suffice is refused, and a host that several processes would fill is warned of, in numbers."""

import logging

import pytest
from torch import nn

from sp_lightning.errors import MemoryBudgetError
from sp_lightning.host.machine import HostMemory
from sp_lightning.host.room import UnitNumbers, first_window
from sp_lightning.stream import preparation

MIB, GIB = 2**20, 2**30


def test_a_budget_that_does_not_suffice_is_refused_in_numbers():
    units = [UnitNumbers(f"block {index}", 100 * MIB, 100 * MIB) for index in range(8)]
    units.append(UnitNumbers("(root)", 50 * MIB, 50 * MIB, resident=True))
    with pytest.raises(MemoryBudgetError, match=r"needs at least 300.00 MiB for block 0, got 200.00 MiB: raise it"):
        first_window("auto", 200 * MIB, units, False)
    with pytest.raises(MemoryBudgetError, match=r"window 6 does not fit .* which holds 4 of the largest"):
        first_window(6, 700 * MIB, units, False)
    assert [first_window(window, 700 * MIB, units, False) for window in ("auto", 3)] == [4, 3]


def test_processes_that_make_more_copies_than_fit_are_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(preparation, "host_memory", lambda: HostMemory(4 * GIB, GIB, "machine", 4 * GIB))
    made = nn.utils.skip_init(nn.Linear, 2**14, 2**14, bias=False)  # 1 GiB, of which no page is touched
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        preparation.check_copies(made, 2)
        preparation.check_copies(made.to("meta"), 4)
    assert not caplog.records
    monkeypatch.setattr(preparation, "host_memory", lambda: HostMemory(4 * GIB, 2 * GIB, "machine", 4 * GIB))
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        preparation.check_copies(nn.utils.skip_init(nn.Linear, 2**14, 2**14, bias=False), 4)
    assert "each of 4 processes makes the model in __init__, with 1.00 GiB of weights" in caplog.text
    assert "3.00 GiB more, but 2.00 GiB are free" in caplog.text

import time

import pytest

from sp_lightning.host.telemetry import Counters


def test_counters_start_at_zero():
    snapshot = Counters().snapshot()
    assert snapshot.pop("stall_ms") == {}
    assert set(snapshot.values()) == {0}


def test_a_snapshot_does_not_change_with_later_counting():
    counters = Counters()
    counters.stall_ms["fetch"] += 1.0
    snapshot = counters.snapshot()
    counters.fetches += 1
    counters.stall_ms["fetch"] += 1.0
    assert (snapshot["fetches"], snapshot["stall_ms"]) == (0, {"fetch": 1.0})


def test_since_gives_what_was_added():
    counters = Counters(bytes_up=10)
    counters.stall_ms["fetch"] += 2.0
    before = counters.snapshot()
    counters.bytes_up += 5
    counters.stall_ms["fetch"] += 0.5
    counters.stall_ms["gradient"] += 3.0
    added = counters.since(before)
    assert added["bytes_up"] == 5
    assert added["evictions"] == 0
    assert added["stall_ms"] == {"fetch": 0.5, "gradient": 3.0}


def test_since_has_the_keys_of_a_snapshot():
    counters = Counters()
    assert counters.since(counters.snapshot()).keys() == counters.snapshot().keys()


def test_a_stall_counts_the_time_inside_also_when_it_fails():
    counters = Counters()
    with pytest.raises(KeyError), counters.stall("gradients"):
        time.sleep(0.02)
        raise KeyError
    once = counters.stall_ms["gradients"]
    with counters.stall("gradients"):
        time.sleep(0.02)
    assert 19 < once < counters.stall_ms["gradients"] - 19

import collections
import dataclasses
import datetime
import functools
import re

import pytest
from torch import nn

from sp_lightning.errors import OptionError
from sp_lightning.options import Bytes, Options, format_both, format_bytes, format_seconds, parse_bytes


def find_blocks(module):
    return [child for child in module.children() if isinstance(child, nn.Linear)]


SWITCHES = ["optimizer_overlap", "master_weights", "compile_units"]


def refused(match, **given):
    with pytest.raises(OptionError, match=match):
        Options.parse(**given)


def test_the_defaults_are_valid_and_normal():
    options = Options()
    assert dataclasses.asdict(options) == {
        "window": "auto",
        "transfer": "auto",
        "resident": "auto",
        "memory_budget": None,
        "units": "auto",
        "activations": "keep",
        "optimizer_overlap": True,
        "optimizer_device": "host",
        "master_weights": False,
        "host_memory": "auto",
        "compile_units": False,
        "wire_dtype": "auto",
        "host_budget": None,
        "disk": None,
    }


def test_an_unknown_option_is_refused_with_the_known_ones():
    refused("an option must be one of window, transfer, .*, got 'windw'", windw=3)


ACCEPTED = {
    "window": [(1, 1), (7, 7), ("7", 7), ("auto", "auto")],
    "transfer": [(1, 1), ("1", 1), ("auto", "auto")],
    "resident": [(0, 0), ("3", 3), ("auto", "auto"), ("8GiB", Bytes(8 << 30))],
    "memory_budget": [(None, None), (1, 1), ("1024B", 1024), ("10GiB", 10 * 2**30), ("10 GB", 10**10)],
    "host_budget": [(None, None), (0, 0), ("0B", 0), ("0", 0), ("48GiB", 48 * 2**30)],
    "units": [
        *[("auto", "auto"), ("Block", ("Block",)), (" Block ", ("Block",)), (["Block", "Head"], ("Block", "Head"))],
        *[(("Block",), ("Block",)), (find_blocks, find_blocks)],
        (collections.UserList(["Block", "Head"]), ("Block", "Head")),  # as a config's list is
    ],
    **dict.fromkeys(SWITCHES, ((True, True), (False, False), ("true", True), ("False", False))),
}


@pytest.mark.parametrize("name, value, expected", [(name, *pair) for name in ACCEPTED for pair in ACCEPTED[name]])
def test_a_value_means(name, value, expected):
    found = getattr(Options.parse(**{name: value}), name)
    assert found == expected and type(found) is type(expected)


COUNT = "must be an int >= 1 or 'auto'"
REFUSED = {
    "window": (COUNT, [0, -1, True, False, 2.0, "0", "-1", "2.0", "many", "", "²", None, [2]]),
    "transfer": (COUNT, [0, True, "many", None]),
    "resident": ("must be an int >= 0, ", [-1, "many", True, 1.5, None]),
    "memory_budget": ("must be None or bytes > 0", [0, -5, True, 1.5, "0", "0GiB", "0.1B", b"10GiB"]),
    "host_budget": ("must be None or bytes >= 0", [-1, True, False, 1.5, b"10GiB"]),
    "disk": ("must be None, or the path of a folder on a local disk", ["", 3, True, b"/nvme", [], ["a"], {"a"}]),
    "units": (
        "must be 'auto', a sequence of class names or a callable",
        ["", " ", [], (), [""], ["Block", 3], [nn.Linear], nn.Linear, 3, None, {"Block"}, {"Block": 1}, b"Block"],
    ),
    "activations": (
        "must be one of 'keep', 'recompute', 'offload', 'recompute+offload'",
        ["drop", "Keep", None, True, ["keep"]],
    ),
    "host_memory": ("must be one of 'auto', 'pinned', 'pageable'", ["disk", "", None, True, ["auto"]]),
    **dict.fromkeys(SWITCHES, ("must be True or False", [0, 1, "yes", "", None])),
}


@pytest.mark.parametrize("name, value", [(name, value) for name in REFUSED for value in REFUSED[name][1]])
def test_any_other_value_is_refused(name, value):
    refused(f"{name} {re.escape(REFUSED[name][0])}.*, got {re.escape(repr(value))}", **{name: value})


def test_an_iterator_of_names_is_refused():
    refused("units must be 'auto', .*, got <generator", units=(name for name in ["Block"]))


def test_transfer_larger_than_window_is_refused():
    refused(r"transfer must be at most window \(3\), got 4", window="3", transfer=4)


def test_a_disk_is_the_path_of_a_folder_and_may_be_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in (str(tmp_path / "nvme"), tmp_path / "nvme", "nvme"):
        assert Options.parse(disk=given).disk == str(tmp_path / "nvme")
    assert Options.parse(disk=None).disk is None


def test_a_budget_that_is_no_size_is_refused():
    refused("memory_budget must be a size with its unit, .*, got '10 gigs'", memory_budget="10 gigs")


@pytest.mark.parametrize(
    ("machines", "found"), [(1, "devices must be 1 .*got 2"), (4, r"num_nodes \* devices .*'4 \* 2'")]
)
def test_steps_on_the_device_are_refused_with_several_devices(machines, found):
    with pytest.raises(OptionError, match=found):
        Options(optimizer_device="device").check_devices(2, machines)
    with pytest.raises(OptionError, match="1 with disk="):
        Options(disk="/tmp").check_devices(2, machines)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("17B", 17),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("1.5 MiB", 3 * 2**19),
        ("0.1 GB", 10**8),
        (" 2TiB ", 2 * 2**40),
        ("3 PB", 3 * 10**15),
    ],
)
def test_text_means_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "64", "1.5", "GiB", "-1GiB", "1G", "1 2 GiB", "1e3", "1,5GiB", ".5GiB", "nan"])
def test_text_that_means_no_bytes_is_refused(text):
    with pytest.raises(
        OptionError,
        match=re.escape(f'size must be a size with its unit, such as "10GiB", "10 GB" or "1024B", got {text!r}'),
    ):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (1_406_600_000, "1.31 GiB"),
        (-(2**30), "-1.00 GiB"),
        (2**60, "1024.00 PiB"),
    ],
)
def test_bytes_are_written_for_a_reader(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize("nbytes", [1025, 679_500_000, 2**20 - 1, 2**30 - 1, 2**30, 2**30 + 1, 3 * 2**40 + 12345])
def test_bytes_that_are_rounded_up_are_enough_and_hardly_more(nbytes):
    assert nbytes <= parse_bytes(format_bytes(nbytes, up=True)) <= nbytes * 1.01


def test_two_sizes_that_round_to_the_same_are_told_apart():
    assert format_both(3 * 2**20 + 1, 3 * 2**20) == ("3.01 MiB", "3.00 MiB")
    assert format_both(3 * 2**20 - 1, 3 * 2**20 - 2) == ("3145727 B", "3145726 B")
    assert format_both(2**30, 2**31) == ("1.00 GiB", "2.00 GiB")
    assert format_both(2**30, 2**30) == ("1.00 GiB", "1.00 GiB")


@pytest.mark.parametrize(
    "seconds, text", [(0.00021, "0.21 ms"), (0.0994, "99 ms"), (0.0996, "100 ms"), (1.44, "1.4 s"), (99.6, "100 s")]
)
def test_seconds_are_written_for_a_reader(seconds, text):
    assert format_seconds(seconds) == text


def test_an_unknown_option_is_answered_with_all_that_a_door_takes():
    import sp_lightning.hf

    with pytest.raises(OptionError, match="host_budget, disk, timeout, keepalive, only_if_needed, got 'windw'"):
        sp_lightning.hf.streaming(windw=3)
    with pytest.raises(OptionError, match="host_budget, disk, timeout, keepalive, got 'windw'"):
        sp_lightning.stream(nn.Linear(1, 1), "cpu", windw=3)
    with pytest.raises(OptionError, match="only_if_needed must be True or False, got 'no'"):
        sp_lightning.hf.streaming(only_if_needed="no")


@pytest.mark.parametrize("value", [30, "1h", None, datetime.timedelta()])
@pytest.mark.parametrize("name", ["timeout", "keepalive"])
def test_how_long_ranks_wait_is_a_timedelta_at_every_door(name, value):
    import sp_lightning.hf

    module = nn.Linear(1, 1)
    for door in (
        sp_lightning.SuperpipelineStrategy,
        sp_lightning.SuperpipelineFabricStrategy,
        sp_lightning.hf.streaming,
        functools.partial(sp_lightning.stream, module, "cpu"),
    ):
        with pytest.raises(OptionError, match=f"{name} must be a datetime.timedelta"):
            door(**{name: value})

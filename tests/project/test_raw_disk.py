"""What benchmarks compare the disk's tiers with: a raw disk is read into memory of the kind that the library has."""

import os
import re
import threading
from pathlib import Path

import pytest
import torch


def mapping_of(view):
    """The kernel's lines about the mapping that has this memory."""
    address, found = torch.frombuffer(view, dtype=torch.uint8).data_ptr(), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (range_ := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            inside = int(range_[1], 16) <= address < int(range_[2], 16)
        found += f"{line}\n" * inside
    return found


@pytest.mark.seldom
def test_what_reads_beside_the_ring_reads_into_private_memory_in_huge_pages(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import source_files

    monkeypatch.setattr(source_files, "CHUNK", 1 << 20)
    for name in "ab":
        (tmp_path / name).write_bytes(os.urandom(3 << 20))
    preadv, read = os.preadv, []

    def spied(fd, views, at):
        if not threading.current_thread().name.startswith("superpipeline") and len(views[0]) > 1 << 16:  # not a trial
            read.append(mapping_of(views[0]))
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", spied)
    found = source_files.speed(tmp_path, 1)
    assert len(found) == 4 and min(found.values()) > 0
    assert len(read) == 2 * 2 * 6  # in two rounds, with and without a thread in pure Python, 3 MiB of each file
    for mapping in read:
        assert re.match(r"\S+ rw-p ", mapping), mapping  # Python's own mapping is shared, which has small pages only
        assert re.search(r"^VmFlags:.* hg\b", mapping, re.MULTILINE), mapping

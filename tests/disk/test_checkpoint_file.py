"""A checkpoint that is written past the page cache is torch's own file, to the byte, or an error."""

import contextlib
import ctypes
import errno
import importlib
import io
import os
import random
import signal
import struct
import threading
import time
import zipfile
import zlib
from types import SimpleNamespace

import in_files
import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import models
import parity
from sp_lightning.disk import checkpoint_file
from sp_lightning.disk.checkpoint_file import BLOCK, LARGE, PIECE, joined, save
from sp_lightning.disk.direct_file import DirectFile
from sp_lightning.disk.scratch_file import ScratchFile
from sp_lightning.disk.source_files import SourceFile
from sp_lightning.errors import DiskError, SourceFileError
from sp_lightning.lightning.checkpoint_io import MappedCheckpointIO

pwrite = os.pwrite


def saved(checkpoint, path):
    with open(path, "w+b") as file:
        save(checkpoint, file)
    return path.read_bytes()


def as_torch_saves(checkpoint):
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


def tensors(seed=0):
    """Storages below and above the size from which they are copied, of odd lengths, some of them shared."""
    torch.manual_seed(seed)
    sizes = [1, LARGE - 1, LARGE, LARGE + 1, 3 * BLOCK, 2 * LARGE + 4097, PIECE + 12345, 0]
    found = {f"of {size}": torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes}
    large = torch.randn(600_000)
    nested = {"view": large[5:10], "whole": large, "half": torch.randn(700_001).bfloat16()}
    return {**found, "nested": [nested, large.view(2, -1)], "epoch": 3, "text": "x" * 5000}


def in_source_files(checkpoint, folder):
    """Move large tensors of a checkpoint into one file, at odd offsets; return the checkpoint and the open file."""
    large = {name: t for name, t in checkpoint.items() if isinstance(t, torch.Tensor) and t.nbytes >= LARGE}
    file = SourceFile(in_files.write(str(folder / "source"), list(large.values())))
    views = {}
    for (name, tensor), offset in zip(large.items(), in_files.offsets(list(large.values())), strict=True):
        part = file.flat.untyped_storage()[offset : offset + tensor.nbytes]
        views[name] = torch.empty(0, dtype=tensor.dtype).set_(part, 0, tensor.shape, tensor.stride())
    return {**checkpoint, **views}, file


@pytest.mark.parametrize("place", ["memory", "files"])
@pytest.mark.few(1)
def test_a_file_is_the_one_that_torch_saves(place, tmp_path):
    checkpoint = tensors()
    expected = as_torch_saves(checkpoint)
    if place == "files":
        checkpoint, _file = in_source_files(checkpoint, tmp_path)
    assert saved(checkpoint, tmp_path / "new") == expected


@pytest.mark.parametrize("alignment", [64, 512, 4096])
@pytest.mark.few(1)
def test_a_file_loads_in_all_modes_and_its_checksums_are_right(alignment, tmp_path):
    from torch.utils.serialization import config

    given, path = tensors(), tmp_path / "new"
    with config.patch({"save.storage_alignment": alignment}):
        assert saved(given, path) == as_torch_saves(given)
    assert zipfile.ZipFile(path).testzip() is None
    for how in [{}, {"mmap": True}, {"weights_only": False}, {"mmap": True, "weights_only": False}]:
        found = torch.load(path, **how)
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found[name], value)
        assert torch.equal(found["nested"][1], given["nested"][1]) and found["epoch"] == 3
        shared = found["nested"][0]["view"].untyped_storage().data_ptr()
        assert shared == found["nested"][1].untyped_storage().data_ptr()


@pytest.mark.quick
@given(st.binary(max_size=100), st.binary(max_size=100))
def test_the_checksum_of_two_pieces_is_that_of_both_together(first, second):
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


# ---- where bytes are read from


def test_what_is_in_an_open_file_is_read_from_it_and_not_through_its_mapping(tmp_path, monkeypatch):
    checkpoint, file = in_source_files({"weights": torch.randn(5_000_000)}, tmp_path)
    read, original = [], SourceFile.read

    def reading(self, memory, begin, nbytes):
        read.append((begin, nbytes))
        return original(self, memory, begin, nbytes)

    monkeypatch.setattr(SourceFile, "read", reading)
    saved(checkpoint, tmp_path / "new")
    assert 20_000_000 <= sum(nbytes for _, nbytes in read) < 20_000_000 + len(read) * BLOCK
    assert all(begin % BLOCK == 0 for begin, _ in read)
    read.clear()
    file.close()
    saved(checkpoint, tmp_path / "new")
    assert not read


def test_what_was_written_since_is_read_from_memory(tmp_path):
    checkpoint, _file = in_source_files({"a": torch.randn(500_000), "b": torch.randn(500_000)}, tmp_path)
    checkpoint["a"][499_999] = 7.0
    found = torch.load(io.BytesIO(saved(checkpoint, tmp_path / "new")))
    assert found["a"][499_999] == 7.0
    assert all(torch.equal(found[name], checkpoint[name]) for name in "ab")


def test_a_source_that_changes_meanwhile_is_an_error(tmp_path, monkeypatch):
    checkpoint, _file = in_source_files({"weights": torch.randn(5_000_000)}, tmp_path)
    original = SourceFile.read

    def reading(self, memory, begin, nbytes):
        original(self, memory, begin, nbytes)
        os.utime(self.path, ns=(1, 1))

    monkeypatch.setattr(SourceFile, "read", reading)
    writer, path = MappedCheckpointIO(direct=True), tmp_path / "last.ckpt"
    writer.save_checkpoint({"old": 1}, path)
    with pytest.raises(SourceFileError, match="changed while weights stayed in it"):
        writer.save_checkpoint(checkpoint, path)
    assert torch.load(path) == {"old": 1} and {p.name for p in tmp_path.iterdir()} == {"last.ckpt", "source"}


def test_a_read_that_fails_is_an_error_and_the_previous_file_stays(tmp_path, monkeypatch):
    checkpoint, _file = in_source_files({"weights": torch.randn(5_000_000)}, tmp_path)
    writer, path = MappedCheckpointIO(direct=True), tmp_path / "last.ckpt"
    writer.save_checkpoint({"old": 1}, path)

    def failing(self, memory, begin, nbytes):
        raise DiskError(path=self.path, offset=begin, errno=errno.EIO)

    monkeypatch.setattr(SourceFile, "read", failing)
    with pytest.raises(DiskError, match="source could not be read at byte"):
        writer.save_checkpoint(checkpoint, path)
    assert torch.load(path) == {"old": 1} and {p.name for p in tmp_path.iterdir()} == {"last.ckpt", "source"}


@pytest.mark.parametrize("place", ["files", "disk"])
@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO], ids=["", "asynchronous"])
@pytest.mark.few(1)
def test_a_run_with_weights_in_files_or_state_on_a_disk_writes_the_plain_run_s_checkpoints(
    plugin, place, device, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint_file, "LARGE", 1)
    monkeypatch.setattr(checkpoint_file, "PIECE", 2 * BLOCK)
    if device.type == "simgpu":
        importlib.import_module("simgpu.lightning")
    directly, original = [], DirectFile.read

    def reading(self, *args):
        if threading.current_thread().name.startswith("superpipeline-save"):
            directly.append(type(self))
        original(self, *args)

    monkeypatch.setattr(DirectFile, "read", reading)

    def run(side):
        case = (in_files.filed if side == "files" else in_files.frozen)(models.case("mlp"))
        strategy = parity.plain_strategy(device.type)
        if side != "plain":
            options = {"host_budget": "0B", "window": 2, "transfer": 1}
            options |= {"disk": tmp_path} if side == "disk" else {}
            strategy = parity.streaming_strategy(device.type, **options)
        L.seed_everything(0, verbose=False)
        saver = ModelCheckpoint(tmp_path / side, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = L.Trainer(
            accelerator=device.type,
            devices=1,
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            strategy=strategy,
            callbacks=[saver],
            plugins=[plugin()] if plugin else None,
        )
        trainer.fit(models.ZooModule(case, "adamw"), models.loader(case, 3))
        found = {path.name: path for path in sorted((tmp_path / side).iterdir())}
        assert all(zipfile.ZipFile(path).testzip() is None for path in found.values())
        return {name: dict(parity.leaves(torch.load(path, weights_only=False))) for name, path in found.items()}

    expected, actual = run("plain"), run(place)
    assert expected.keys() == actual.keys() and len(actual) == 3
    for name, leaves in expected.items():
        assert leaves.keys() == actual[name].keys()
        for leaf, value in leaves.items():
            if isinstance(value, torch.Tensor):
                assert not parity.difference(value.cpu(), actual[name][leaf].cpu()), (name, leaf)
    assert plugin is not None or set(directly) == {SourceFile if place == "files" else ScratchFile}


# ---- writes that are short, refused, or fail


def is_direct(fd):
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags"))
    return bool(flags & os.O_DIRECT)


def test_large_storages_are_written_directly_in_whole_blocks(tmp_path, monkeypatch):
    direct = []

    def writing(fd, memory, at):
        if is_direct(fd):
            assert at % BLOCK == len(memory) % BLOCK == 0
            direct.append(len(memory))
        return pwrite(fd, memory, at)

    monkeypatch.setattr(os, "pwrite", writing)
    given = {"a": torch.randn(5_000_000), "b": torch.randn(1_000_003)}
    assert saved(given, tmp_path / "new") == as_torch_saves(given)
    if not direct:
        pytest.skip("this filesystem has no direct writes")
    assert sum(direct) > 24_000_000 - 4 * BLOCK


def test_what_is_written_directly_lies_in_private_memory_that_may_have_huge_pages(tmp_path, monkeypatch):
    """The kernel takes its pages one by one: in pages of 4 KiB a transfer takes twice as long."""
    found = []

    def writing(fd, memory, at):
        if is_direct(fd):
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            found.append(in_files.may_have_huge_pages(address) and "dc" in in_files.flags_at(address))
        return pwrite(fd, memory, at)

    monkeypatch.setattr(os, "pwrite", writing)
    saved({"a": torch.randn(5_000_000)}, tmp_path / "new")
    assert all(found)
    if not found:
        pytest.skip("this filesystem has no direct writes")


@pytest.mark.parametrize("how", ["short", "refused"])
def test_a_write_is_whole(how, tmp_path, monkeypatch):
    def writing(fd, memory, at):
        if how == "refused" and is_direct(fd):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(fd, memory[: random.choice([1, len(memory), max(1, len(memory) // 3)])], at)

    monkeypatch.setattr(os, "pwrite", writing)
    given = tensors()
    assert saved(given, tmp_path / "new") == as_torch_saves(given)


def test_a_filesystem_without_direct_writes_is_written_through_the_page_cache(tmp_path, monkeypatch):
    def opening(path, flags, *args, original=os.open, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opening)
    given = tensors()
    assert saved(given, tmp_path / "new") == as_torch_saves(given)


def no_reserving(error):
    """A C library whose `fallocate` fails."""

    def fallocate(*args):
        ctypes.set_errno(error)
        return -1

    return SimpleNamespace(fallocate=fallocate)


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.few(1)
def test_a_filesystem_that_cannot_reserve_a_range_is_written_all_the_same(error, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_file, "libc", lambda: no_reserving(error))
    given = tensors()
    assert saved(given, tmp_path / "new") == as_torch_saves(given)


@pytest.mark.parametrize("place", ["reserving", "first write", "last write", "checksum", "sync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.few(1)
def test_a_write_that_fails_leaves_the_previous_file_and_nothing_else(place, error, tmp_path, monkeypatch):
    writer, path = MappedCheckpointIO(direct=True), tmp_path / "last.ckpt"
    writer.save_checkpoint({"old": 1}, path)
    given = tensors()
    count = []

    def failing(*args):
        raise OSError(error, os.strerror(error))

    def writing(fd, memory, at):
        count.append(at)
        if (
            place == "first write"
            or (place == "last write" and len(count) == 8)
            or (place == "checksum" and len(memory) == 4)
        ):
            failing()
        return pwrite(fd, memory, at)

    monkeypatch.setattr(os, "pwrite", writing)
    if place == "sync":
        monkeypatch.setattr(os, "fsync", failing)
    elif place == "reserving":
        monkeypatch.setattr(checkpoint_file, "libc", lambda: no_reserving(error))
    with pytest.raises(
        OSError, match=f"{os.strerror(error)}; the previous checkpoint is intact: '.*last.ckpt'"
    ) as info:
        writer.save_checkpoint(given, path)
    assert info.value.errno == error
    assert torch.load(path) == {"old": 1} and os.listdir(tmp_path) == ["last.ckpt"]
    monkeypatch.undo()
    writer.save_checkpoint(given, path)
    assert torch.equal(torch.load(path)["of 1"], given["of 1"])


# ---- a process that is killed


def moments(count):
    return pytest.param(count, marks=[] if count < 10 else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("count", [moments(5), moments(50)])
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.few(1)
def test_whenever_a_process_is_killed_a_whole_checkpoint_is_there_and_nothing_else(direct, count, tmp_path):
    """One file that each save replaces, and one of its own for each."""
    randomness = random.Random(count)
    writer, last = MappedCheckpointIO(direct), tmp_path / "last.ckpt"
    folder = tmp_path / "each"

    def write(number):
        # By numpy: torch's own threads do not work in a forked process.
        many, few = (torch.from_numpy(np.full(size, float(number), np.float32)) for size in (4_000_000, 9))
        state = {"number": number, "weights": many, "few": few}
        writer.save_checkpoint(state, last)
        writer.save_checkpoint(state, folder / f"step={number}.ckpt")

    begin = time.perf_counter()
    write(0)
    for path in folder.iterdir():
        path.unlink()
    seconds = time.perf_counter() - begin
    seen = set()
    for moment in range(count):
        begun, begins = os.pipe()
        child = os.fork()
        if not child:
            try:
                for number in range(1000 * moment, 1000 * moment + 1000):
                    os.write(begins, b"1")
                    write(number)
            finally:
                os._exit(1)
        for _ in range(moment % 3 + 1):
            os.read(begun, 1)
        time.sleep(randomness.uniform(0, 1.2) * seconds)
        os.kill(child, signal.SIGKILL)
        os.close(begun)
        os.close(begins)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        # Between two calls a whole file that is to replace another one has a name of its own, until the next save.
        parts = list(tmp_path.glob("last.ckpt.part"))
        assert {path.name for path in tmp_path.iterdir()} - {path.name for path in parts} == {"each", "last.ckpt"}
        for path in (last, *parts, *folder.iterdir()):
            assert path in parts or path.suffix == ".ckpt"
            assert zipfile.ZipFile(path).testzip() is None
            found = torch.load(path, mmap=True)
            number = found["number"]
            assert bool((found["weights"] == number).all()) and bool((found["few"] == number).all())
            seen.add(number)
            if path.parent == folder:
                path.unlink()
    write(0)
    assert {path.name for path in tmp_path.iterdir()} == {"each", "last.ckpt"}
    assert len(seen) > count // 3


def test_a_header_that_is_in_a_buffer_still_tells_where_its_bytes_begin(tmp_path):
    """torch's writer seeks over a hole, which happens to empty the buffer."""
    values = torch.arange(1 << 19)
    with (
        open(tmp_path / "checkpoint", "w+b") as file,
        contextlib.closing(checkpoint_file.CopiesToFile(file, {})) as copies,
    ):
        file.write(bytes(26) + struct.pack("<HH", 5, 7) + bytes(12))
        copies._fill(0, values.untyped_storage())
        (hole,) = copies._holes
        assert hole.begin == 30 + 5 + 7 and hole.checksum() == zlib.crc32(values.numpy())
        assert os.pread(file.fileno(), values.nbytes, hole.begin) == values.numpy().tobytes()

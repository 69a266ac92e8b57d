"""The scratch file is nameless, its tensors are right for any reader, and all that can go wrong has a typed error."""

import contextlib
import errno
import gc
import os
import random
import re
import stat
import threading
import time

import in_files
import pytest
import torch

from sp_lightning.disk import scratch_file
from sp_lightning.disk.direct_file import BLOCK, Mount, mount_of
from sp_lightning.disk.scratch_file import ScratchFile, check_room
from sp_lightning.errors import DiskError, OptionError
from sp_lightning.ranks.board import ONE_RANK


@pytest.fixture
def file(tmp_path):
    """A file in a folder."""
    with contextlib.closing(ScratchFile(str(tmp_path), ONE_RANK)) as made:
        yield made


def memory(nbytes):
    from sp_lightning.disk.direct_ring import buffer_over
    from sp_lightning.memory.pinned import HostAllocator

    return buffer_over(HostAllocator().plain(nbytes))


def test_it_has_no_name_and_only_its_user_may_open_it(file, tmp_path):
    file.tensors([torch.empty(3, 5)])
    assert os.listdir(tmp_path) == []
    status = os.fstat(file._fd)
    assert status.st_nlink == 0 and stat.S_IMODE(status.st_mode) == 0o600


def test_tensors_are_zeros_with_the_shape_type_and_strides_that_are_asked_for(file):
    like = [torch.empty(3, 5), torch.empty(7, 4, dtype=torch.bfloat16).t(), torch.empty(2, dtype=torch.float64)]
    for tensor, made in zip(like, file.tensors(like), strict=True):
        assert (made.shape, made.dtype, made.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert not made.any() and made.untyped_storage().nbytes() == made.nbytes


def test_each_way_sees_what_the_other_wrote(file):
    (tensor,) = file.tensors([torch.empty(5000)])
    place, buffer = file.place_of(tensor), memory(5 * BLOCK)
    tensor.copy_(torch.arange(5000.0))
    file.read(buffer.memory, place.offset, 5 * BLOCK)
    assert torch.equal(buffer.flat[:20000].view(torch.float32), torch.arange(5000.0))
    buffer.flat.fill_(1)
    file.write(buffer.memory, place.offset, 5 * BLOCK)
    assert bool((tensor.view(torch.uint8) == 1).all())


def test_only_its_own_whole_tensors_have_a_place(file):
    one, other = file.tensors([torch.empty(5000), torch.empty(10)])
    assert file.place_of(one).offset % BLOCK == file.place_of(other).offset % BLOCK == 0
    assert file.place_of(one[:10]) is file.place_of(one[1:]) is file.place_of(torch.empty(5000)) is None
    assert file.place_of(one.view(50, 100)) == file.place_of(one)


@pytest.mark.parametrize("is_closed", [False, True])
def test_space_is_free_again_once_no_tensor_is_left(is_closed, file):
    descriptor = os.dup(file.descriptor)

    def allocated():
        return os.fstat(descriptor).st_blocks * 512

    before = allocated()
    kept, gone = file.tensors([torch.empty(1 << 20)]), file.tensors([torch.empty(1 << 20)])
    kept[0].fill_(1)
    gone[0].fill_(2)
    address = gone[0].data_ptr()
    assert allocated() - before >= (8 << 20) - BLOCK
    if is_closed:
        file.close()
    del gone
    gc.collect()
    assert allocated() - before < 5 << 20 and address not in file._places
    assert file.place_of(kept[0]) is not None and bool((kept[0] == 1).all())
    os.close(descriptor)


def test_many_tensors_are_few_mappings(tmp_path, monkeypatch):
    """A process may have 65,530 mappings, and a mixture of experts more weights than that."""

    def mappings():
        with open("/proc/self/maps") as lines:
            return sum(str(tmp_path) in line for line in lines)

    monkeypatch.setattr(scratch_file, "ADDRESSES", 100 * scratch_file.SEGMENT)
    with contextlib.closing(ScratchFile(str(tmp_path), ONE_RANK)) as file:
        made = [file.tensors([torch.empty(10)])[0] for _ in range(500)]
        made += file.tensors([torch.empty(200 * scratch_file.SEGMENT)])
        made += [file.tensors([torch.empty(10)])[0] for _ in range(550)]
        for number, tensor in enumerate(made):
            tensor.fill_(number)
        assert mappings() <= 15
        assert all(bool((tensor == number).all()) for number, tensor in enumerate(made))
        del made[500]
        assert all(bool((tensor == number + (number >= 500)).all()) for number, tensor in enumerate(made))
        reserved = file._addresses._begin
        assert in_files.flags_at(reserved)
    assert not in_files.flags_at(reserved)
    del made, tensor
    assert mappings() == 0


def test_tensors_live_on_after_the_file_was_closed(tmp_path):
    file = ScratchFile(str(tmp_path), ONE_RANK)
    (tensor,) = file.tensors([torch.empty(5000)])
    tensor.fill_(3)
    file.close()
    file.close()
    assert bool((tensor == 3).all())
    tensor.fill_(4)
    del tensor


def test_a_forked_process_gets_an_error(file):
    (tensor,) = file.tensors([torch.empty(5000)])
    child = os.fork()
    if child == 0:
        try:
            tensor.fill_(1)
        except RuntimeError as error:
            os._exit(7 if "forked process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not tensor.any()


# ---- folders that cannot have one


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OptionError, match=r"disk must be a folder on a local disk.*no such folder"):
        ScratchFile(str(tmp_path / "nothing"), ONE_RANK)


@pytest.mark.parametrize("kind, why", [("tmpfs", "in memory"), ("nfs4", "a network filesystem")])
def test_a_filesystem_that_is_refused(kind, why, tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_file, "mount_of", lambda file: Mount(kind, 0))
    with pytest.raises(OptionError, match=f"disk must be .*{kind}.*{why}"):
        ScratchFile(str(tmp_path), ONE_RANK)


def test_memory_that_passes_as_a_disk_is_refused():
    if not os.path.isdir("/dev/shm") or mount_of("/dev/shm").kind != "tmpfs":
        pytest.skip("this system has no tmpfs at /dev/shm")
    with pytest.raises(OptionError, match="tmpfs"):
        ScratchFile("/dev/shm", ONE_RANK)


@pytest.mark.parametrize("below", ["memory", "disk"])
def test_an_overlay_is_refused_if_what_lies_below_is_memory(below, tmp_path, monkeypatch):
    """The table says nothing of that: it is found by a file, whose pages memory cannot drop."""
    folder = "/dev/shm" if below == "memory" else str(tmp_path)
    if not os.path.isdir(folder) or (mount_of(folder).kind == "tmpfs") != (below == "memory"):
        pytest.skip("there is no such folder here")
    monkeypatch.setattr(scratch_file, "mount_of", lambda file: Mount("overlay", 0))
    refused = pytest.raises(OptionError, match="overlay, over a filesystem in memory")
    with refused if below == "memory" else contextlib.nullcontext():
        ScratchFile(folder, ONE_RANK).close()


def test_a_filesystem_that_copies_what_is_written_is_refused_unless_it_can_be_told_not_to(tmp_path, monkeypatch):
    mount = Mount("btrfs", 0)
    monkeypatch.setattr(scratch_file, "mount_of", lambda file: mount)
    told = []

    def ioctl(fd, request, flags):
        told.append(request)
        if refuses:
            raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    refuses = False
    ScratchFile(str(tmp_path), ONE_RANK).close()
    assert told == [scratch_file.GET_FLAGS, scratch_file.SET_FLAGS]
    refuses = True
    with pytest.raises(OptionError, match="btrfs, which copies what is written"):
        ScratchFile(str(tmp_path), ONE_RANK)


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *more, **others):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EACCES, "Permission denied")
        return opened(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OptionError, match="Permission denied"):
        ScratchFile(str(tmp_path), ONE_RANK)


def test_another_system_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(OptionError, match="None on this system: it needs Linux"):
        ScratchFile(str(tmp_path), ONE_RANK)


# ---- transfers that fail


@pytest.mark.parametrize("at_most", [1000, BLOCK, BLOCK + 100])
def test_short_transfers_are_continued(at_most, file, monkeypatch):
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:at_most]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:at_most]], at))
    (tensor,) = file.tensors([torch.empty(5000)])
    buffer, place = memory(5 * BLOCK), file.place_of(tensor)
    buffer.flat[:20000].view(torch.float32).copy_(torch.arange(5000.0))
    file.write(buffer.memory, place.offset, 5 * BLOCK)
    assert torch.equal(tensor, torch.arange(5000.0))
    buffer.flat.zero_()
    file.read(buffer.memory, place.offset, 5 * BLOCK)
    assert torch.equal(buffer.flat[:20000].view(torch.float32), torch.arange(5000.0))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_says_where(number, file, monkeypatch):
    (tensor,) = file.tensors([torch.empty(5000)])
    place, buffer = file.place_of(tensor), memory(5 * BLOCK)

    def fail(fd, views, at):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", fail)
    said = (
        f"could not be written at byte {place.offset}: {re.escape(os.strerror(number))} .*name another one, and go on"
    )
    with pytest.raises(DiskError, match=said) as caught:
        file.write(buffer.memory, place.offset, 5 * BLOCK)
    assert caught.value.errno == number and caught.value.writes


# ---- segments of several ranks (scratch_file.py, Rule 6)


def room(descriptor):
    """The size of a file, and how many of its bytes have room on the disk."""
    of = os.fstat(descriptor)
    return of.st_size, 512 * of.st_blocks


def test_a_segment_of_several_ranks_is_in_the_file_to_its_end_and_gets_room_as_it_is_held(tmp_path):
    with contextlib.closing(ScratchFile(str(tmp_path), ONE_RANK)) as file:
        segment = file.share(100 * BLOCK, 1)
        size, before = room(segment.source.descriptor)
        assert size >= segment.begin + 100 * BLOCK and before < 50 * BLOCK
        file.hold(segment.begin, 50 * BLOCK, torch.empty(0), None)
        assert room(segment.source.descriptor)[1] >= before + 50 * BLOCK - BLOCK
        os.close(segment.source.descriptor)


def test_a_disk_that_is_full_says_how_much_is_missing(file, monkeypatch, tmp_path):
    def fail(fd, begin, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(
        DiskError, match=r"Optimizer state needs 4\.\d\d MiB there, and .*iB are free: nothing was stepped"
    ):
        file.tensors([torch.empty(1 << 20)])
    with pytest.raises(DiskError, match=r"Free 1024\.00 PiB or name another disk or raise host_budget by 1024\.00 PiB"):
        check_room(str(tmp_path), 1 << 60)
    with monkeypatch.context() as full:
        full.setattr(scratch_file, "free_nbytes", lambda folder: 5 << 20)
        check_room(str(tmp_path), 3 << 20, 2 << 20)
        fits = r"\(3.00 MiB\) and checkpoints \(4.00 MiB\) need 7.00 MiB there, and 5.00 MiB are"
        with pytest.raises(
            DiskError, match=fits + r".*Free 2.00 MiB or save .* or name .* or raise host_budget by 2.00 MiB"
        ):
            check_room(str(tmp_path), 3 << 20, 4 << 20)
        with pytest.raises(DiskError, match=r"or name another disk$"):  # no state, and no room still
            check_room(str(tmp_path), 3 << 20, 6 << 20)


@pytest.mark.parametrize("how", ["open", "incoherent", "later"])
def test_a_filesystem_without_direct_transfers_goes_through_the_page_cache(how, tmp_path, monkeypatch, caplog):
    opened, preadv, pwritev, direct = os.open, os.preadv, os.pwritev, set()

    def open_(path, flags, *more, **others):
        if flags & os.O_DIRECT and flags & os.O_TMPFILE != os.O_TMPFILE:
            if how == "open":
                raise OSError(errno.EINVAL, "Invalid argument")
            fd = opened(path, flags, *more, **others)
            direct.add(fd)
            return fd
        return opened(path, flags, *more, **others)

    def read(fd, views, at):
        count = preadv(fd, views, at)
        if fd in direct and how == "incoherent":
            views[0][0] = views[0][0] ^ 1
        return count

    def write(fd, views, at):
        if fd in direct and how == "later" and at:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwritev(fd, views, at)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "pwritev", write)
    with contextlib.closing(ScratchFile(str(tmp_path), ONE_RANK)) as file:
        file.tensors([torch.empty(10)])
        (tensor,) = file.tensors([torch.empty(5000)])
        buffer, place = memory(5 * BLOCK), file.place_of(tensor)
        buffer.flat.fill_(1)
        file.write(buffer.memory, place.offset, 5 * BLOCK)
        assert bool((tensor.view(torch.uint8) == 1).all())
        tensor.zero_()
        file.read(buffer.memory, place.offset, 5 * BLOCK)
        assert not buffer.flat[:20000].any()
        assert not file.is_direct
    assert sum("optimizer state goes through the page cache" in message for message in caplog.messages) == 1


@pytest.mark.slow
def test_user_code_and_transfers_see_each_other_at_any_time(file):
    """Random reads and writes of both sides, while other threads fault pages in."""
    block, count, seconds = 1 << 20, 64, 20
    (flat,) = file.tensors([torch.empty(block * count // 8, dtype=torch.int64)])
    offset, buffer, rng = file.place_of(flat).offset, memory(block), random.Random(0)
    parts, here = flat.view(count, -1), buffer.flat.view(torch.int64)
    expected = torch.zeros_like(parts, device="cpu").clone()
    ends = threading.Event()

    def look():
        own = random.Random(1)
        while not ends.is_set():
            parts[own.randrange(count), own.randrange(block // 8)].item()

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    end, done = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < end:
            done += 1
            at, kind = rng.randrange(count), rng.choice(["write", "read", "user write", "user read", "user element"])
            if kind == "write":
                here.fill_(done)
                file.write(buffer.memory, offset + at * block, block)
                expected[at] = done
            elif kind == "user write":
                parts[at] = expected[at] = done
            elif kind == "user element":
                element = rng.randrange(block // 8)
                parts[at, element] = expected[at, element] = -done
            elif kind == "read":
                here.zero_()
                file.read(buffer.memory, offset + at * block, block)
                assert torch.equal(here, expected[at]), done
            else:
                assert torch.equal(parts[at], expected[at]), done
    finally:
        ends.set()
        for reader in readers:
            reader.join()
    assert torch.equal(parts, expected) and done > 200

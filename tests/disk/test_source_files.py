"""Where in files the bytes of weights are, by what the kernel says, and reads of them that are whole or an error."""

import errno
import io
import mmap
import os
import pickle
from unittest import mock

import in_files
import pytest
import torch
from torch import nn

from sp_lightning.disk import source_files
from sp_lightning.disk.direct_file import Mount, mount_of
from sp_lightning.disk.source_files import BLOCK, SourceFile, find, mappings, written
from sp_lightning.errors import DiskError, SourceFileError

preadv = os.preadv


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    return in_files.write(str(tmp_path / "weights"), [torch.randn(5000), torch.randn(3, 7), torch.randn(4000)])


def bytes_of(file, offset, nbytes):
    return bytes(file.bytes_of(offset, nbytes).numpy())


def content(path, offset, nbytes):
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(nbytes)


# ---- which file has a tensor's bytes


def loaded(loader, tensors, tmp_path):
    path = str(tmp_path / "file")
    if loader == "torch.load":
        torch.save(tensors, path)
        return torch.load(path, mmap=True), path
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(tensors, path)
    return safetensors.load_file(path), path


@pytest.mark.parametrize("loader", ["torch.load", "load_file"])
def test_the_place_of_what_loaders_map_is_found(loader, tmp_path):
    given = {"a": torch.randn(300, 7), "b": torch.ones(3, dtype=torch.uint8), "c": torch.randn(5000).bfloat16()}
    tensors, path = loaded(loader, given, tmp_path)
    found = find(tensors.values())
    for name, tensor in tensors.items():
        place = found[id(tensor)]
        assert place.mapping.path == path and place.nbytes == tensor.nbytes
        assert content(path, place.offset, place.nbytes) == in_files.raw(given[name])


def test_from_pretrained_in_the_type_of_the_file_leaves_all_weights_in_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert len(find(model.parameters())) == len(list(model.parameters()))


def test_what_is_in_memory_or_in_a_shared_mapping_is_in_no_file(path):
    shared = torch.from_file(path, shared=True, size=100)
    assert find([torch.randn(5000), torch.empty(0), torch.empty(3, device="meta"), shared]) == {}
    assert find([torch.randn(3, 3).to_sparse()]) == {}


def test_only_tensors_that_fill_their_bytes_are_found(path):
    (whole,) = in_files.mapped_views(path, [torch.empty(5000)])
    square = whole[:4900].view(70, 70)
    odd = {"rows": square[::2], "repeated": whole[:1].expand(9), "columns": square[:, :3]}
    assert [name for name, view in odd.items() if id(view) in find(odd.values())] == []
    turned = square.t()
    assert find([turned])[id(turned)].nbytes == 4900 * 4


@pytest.mark.parametrize("write", ["in place", "numpy", "data"])
def test_a_write_is_seen_however_it_came_and_in_what_shares_its_page(write, path):
    like = [torch.empty(5000), torch.empty(3, 7), torch.empty(4000)]
    first, second, third = in_files.mapped_views(path, like)
    assert len(find([first, second, third])) == 3
    if write == "in place":
        second.mul_(2)
    elif write == "numpy":
        second.numpy()[1, 1] = 3
    else:
        second.data[0, 0] = 3
    found = find([first, second, third])
    assert id(second) not in found
    page = second.data_ptr() // mmap.PAGESIZE
    for other in (first, third):
        pages = range(other.data_ptr() // mmap.PAGESIZE, (other.data_ptr() + other.nbytes - 1) // mmap.PAGESIZE + 1)
        assert (id(other) in found) == (page not in pages)
    a_page_on = first[2048:]  # begins beyond the first page
    assert written([(first.data_ptr(), 100), (a_page_on.data_ptr(), 100)]) == []


def test_a_read_is_no_write(path):
    (tensor,) = in_files.mapped_views(path, [torch.empty(5000)])
    tensor.sum()
    assert id(tensor) in find([tensor])


def test_neighbouring_mappings_of_one_file_are_one(path, tmp_path):
    os.truncate(path, 8 * mmap.PAGESIZE)
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    address = view.data_ptr()
    view[3 * mmap.PAGESIZE] = 7  # may split what the kernel lists
    here = [mapping for mapping in mappings() if mapping.begin <= address < mapping.end]
    assert [(mapping.begin, mapping.end - mapping.begin) for mapping in here] == [(address, 8 * mmap.PAGESIZE)]
    assert here[0].path == path


# ---- reads


@pytest.mark.parametrize("at_most", [1, 100, BLOCK, BLOCK + 100, 5 * BLOCK])
def test_short_reads_are_continued(at_most, path, monkeypatch):
    file = SourceFile(path)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:at_most]], at))
    offset, nbytes = in_files.HEADER, 20000 if at_most > 1 else 50
    assert bytes_of(file, offset, nbytes) == content(path, offset, nbytes)
    file.close()


def test_the_last_bytes_of_a_file_are_read(path):
    file = SourceFile(path)
    assert bytes_of(file, file.nbytes - 5, 5) == content(path, file.nbytes - 5, 5)
    file.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_an_error_says_where(number, path, monkeypatch):
    file = SourceFile(path)

    def fail(fd, views, at):
        if at >= 2 * BLOCK:
            raise OSError(number, os.strerror(number))
        return preadv(fd, [views[0][: 2 * BLOCK]], at)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DiskError, match=os.strerror(number)) as caught:
        file.bytes_of(0, 20000)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.path, error.offset, error.errno, str(error)) == (path, 2 * BLOCK, number, str(caught.value))
    file.close()


def refusing(how):
    """A filesystem that refuses direct reads: when a file is opened, at the first read, or later."""
    opened, direct = os.open, set()

    def open_(path, flags, *more, **others):
        if flags & os.O_DIRECT and how == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = opened(path, flags, *more, **others)
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def read(fd, views, at):
        if fd in direct and (how == "read" or (how == "later" and at > 0)):
            raise OSError(errno.EINVAL, "Invalid argument")
        count = preadv(fd, views, at)
        if fd in direct and how == "other bytes":
            views[0][0] = views[0][0] ^ 1
        return count

    return open_, read


@pytest.mark.parametrize("how", ["open", "read", "later", "other bytes"])
def test_a_filesystem_without_direct_reads_is_read_through_the_page_cache_and_that_is_said_once(
    how, path, monkeypatch, caplog
):
    open_, read = refusing(how)
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", read)
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *given: dropped.append(given))
    file = SourceFile(path)
    for offset in (in_files.HEADER, 3 * BLOCK):
        assert bytes_of(file, offset, 10000) == content(path, offset, 10000)
    assert not file.is_direct
    assert sum("cannot be read directly" in message for message in caplog.messages) == 1
    assert dropped[-1] == (3 * BLOCK, 10000, os.POSIX_FADV_DONTNEED)
    file.close()


def test_a_file_in_memory_is_read_as_it_is(path, monkeypatch, caplog):
    monkeypatch.setattr(source_files, "mount_of", lambda file: Mount("tmpfs", 0))
    file = SourceFile(path)
    assert not file.is_direct and caplog.messages == []
    assert bytes_of(file, 5, 9000) == content(path, 5, 9000)
    file.close()


def test_the_mount_of_a_file_is_found(tmp_path):
    assert mount_of("/proc").kind == "proc"
    with open(tmp_path / "file", "w") as file:
        assert mount_of(file.fileno()) == mount_of(str(tmp_path))


TABLE = """\
26 1 253:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
44 26 0:38 /home /data\\040two rw,relatime - btrfs /dev/vdb rw,subvol=/home
45 26 0:39 / /mnt/cloud rw - fuse.{name} remote:bucket rw
46 26 8:17 / /mnt/stick rw - fuseblk /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    "number, kind, remote",
    [
        (26, "ext4", False),
        (44, "btrfs", False),
        (45, "fuse.rclone", True),
        (45, "fuse.any-cloud", True),
        (45, "fuse.fuse-overlayfs", False),
        (46, "fuseblk", False),
        (47, "", False),
    ],
)
def test_a_filesystem_without_a_block_device_is_a_networks_unless_it_is_known(number, kind, remote, monkeypatch):
    """By the number of the file's mount: the device number of a btrfs subvolume is in no table."""
    files = {"/proc/self/fdinfo/7": f"pos:\t0\nmnt_id:\t{number}\n"}
    files["/proc/self/mountinfo"] = TABLE.replace("{name}", kind.removeprefix("fuse."))
    monkeypatch.setattr("builtins.open", lambda path, **_: io.StringIO(files[path]))
    monkeypatch.setattr(os, "fstat", lambda fd: mock.Mock(st_dev=os.makedev(0, 99)))
    mount = mount_of(7)
    assert (mount.kind, mount.is_remote) == (kind, remote)


NETWORKS = "nfs4 cifs smb3 9p virtiofs wekafs lustre vboxsf fuse fuse.sshfs fuse.gcsfuse fuse.lustre fuse.glusterfs"


@pytest.mark.parametrize("kind", NETWORKS.split())
def test_filesystems_that_are_on_no_disk_of_this_machine(kind):
    assert Mount(kind, os.makedev(0, 40)).is_remote


# ---- a file that changes


def truncated(path):
    os.truncate(path, 5000)


def rewritten(path):
    with open(path, "r+b") as file:
        file.seek(300)
        file.write(b"x")


def longer(path):
    with open(path, "ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("change", [truncated, rewritten, longer])
def test_a_file_that_changed_is_an_error(change, path):
    file = SourceFile(path)
    file.check()
    change(path)
    with pytest.raises(SourceFileError, match="changed while weights stayed in it"):
        file.check()
    file.close()


@pytest.mark.parametrize("change", [truncated, rewritten, longer])
def test_a_file_that_changed_since_it_was_left_is_not_opened_again(change, path):
    file = SourceFile(path)
    file.close()
    left = source_files.LEFT[file.flat.data_ptr()]
    change(path)
    opened = os.listdir("/proc/self/fd")
    with pytest.raises(SourceFileError, match="changed while weights stayed in it"):
        SourceFile(path, left)
    assert len(os.listdir("/proc/self/fd")) == len(opened)


def test_a_file_is_mapped_on_the_host_whatever_device_is_the_default(path):
    with torch.device("meta"):
        file = SourceFile(path)
    assert file.flat.numpy().tobytes() == content(path, 0, file.nbytes)
    file.close()


def test_a_read_beyond_a_file_that_was_cut_is_an_error(path):
    file = SourceFile(path)
    truncated(path)
    with pytest.raises(SourceFileError, match="it has 5000 bytes"):
        file.bytes_of(0, 20000)
    file.close()


def test_a_file_that_another_one_replaced_stays_what_it_was(path, tmp_path):
    file, before = SourceFile(path), content(path, 0, 9000)
    os.replace(in_files.write(str(tmp_path / "other"), [torch.zeros(9000)]), path)
    file.check()
    assert bytes_of(file, 0, 9000) == before
    file.close()


def test_a_mapping_is_known_to_be_of_another_file(path, tmp_path):
    net = nn.Linear(70, 70).requires_grad_(False)
    (there,) = in_files.put(net, str(tmp_path), files=1)
    place = find([net.weight])[id(net.weight)]
    same, other = SourceFile(there), SourceFile(path)
    assert same.identity == place.mapping.file != other.identity
    same.close()
    other.close()

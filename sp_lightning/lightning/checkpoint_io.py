"""Checkpoint files of models that fill the host's memory."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Container, Iterator
from typing import IO, Any

import numpy
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.serialization import config

from ..compat.lightning import is_local, local_name
from ..errors import SuperpipelineError
from ..host.memory import private_mapping
from ..store import scratch
from ..store.direct import BLOCK, DirectFile, mount_of
from .names import ModelParallelStrategy, TorchCheckpointIO

log = logging.getLogger(__name__)

COPIED_BY_LIGHTNING = {"state_dict", "optimizer_states", "current_model_state"}  # while it resumes
_UNDER_WAY: dict[str, IO[bytes]] = {}  # files that are being written, by the paths that they will have
COPIED = 32 << 20  # bytes that are copied at a time from a scratch file
CANNOT_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # raised by file systems without fsync


class MappedCheckpointIO(TorchCheckpointIO):
    """Save and load checkpoints without a second copy of the model in memory.

    A local file is mapped into memory when loaded. It is written straight from the tensors into a file beside the
    previous checkpoint, which it replaces once it is complete."""

    copied_later: Container[str] = COPIED_BY_LIGHTNING  # entries that whoever loads a checkpoint copies by itself

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a local checkpoint straight from the tensors; leave any other path to Lightning, which copies first."""
        local = local_path(path)
        if storage_options is not None or local is None:
            return super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        with new_file(local) as file:
            if not scratch.files:
                torch.save(checkpoint, file)
                return
            settings: Any = config  # for whole blocks, and without sums, which would read all through the mapping
            settings = settings.patch({"save.storage_alignment": BLOCK, "save.compute_crc32": False})
            target: Any = _FromScratch(file)
            with settings, contextlib.closing(target):
                torch.save(checkpoint, target)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Map a local checkpoint into memory; leave remote files and torch's old format to Lightning."""
        local = local_path(path)
        if local is None or not os.path.isfile(local) or not zipfile.is_zipfile(local):
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        checkpoint = torch.load(local, map_location=map_location, weights_only=weights_only, mmap=True)
        # The largest entries are copied later. Other readers may store tensors of the rest, and to read a mapped tensor
        # whose file is gone would kill the process.
        others = {key: value for key, value in checkpoint.items() if key not in self.copied_later}
        return {**checkpoint, **apply_to_collection(others, torch.Tensor, on_host)}


class _Target(DirectFile):
    """A file that is written, whose errors are the system's."""

    def failed(self, offset: int, number: int, writes: bool) -> Exception:
        return OSError(number, os.strerror(number), self.path) if writes else super().failed(offset, number, writes)


class _FromScratch:
    """A file that torch saves to; whole blocks of scratch files are copied to it past the page cache."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.flush = file, file.flush
        self._target = _Target(str(file.name), os.dup(file.fileno()), mount_of(file.fileno()).kind)
        self._target.open_directly(os.O_RDWR, lambda fd: True)
        self._memory = private_mapping(COPIED)

    def write(self, data: memoryview) -> None:
        """Write what comes next."""
        at, whole = self._file.tell(), len(data) // BLOCK * BLOCK
        address = numpy.frombuffer(data, numpy.uint8).ctypes.data
        found = ((source, source.offset_at(address)) for source in list(scratch.files.values()))
        source, offset = next((place for place in found if place[1] is not None), (None, 0))
        if source is not None and offset is not None and at % BLOCK == 0:
            self._file.flush()
            for first in range(0, whole, COPIED):
                nbytes = min(COPIED, whole - first)
                source.read(memoryview(self._memory), offset + first, nbytes)
                self._target.write(memoryview(self._memory), at + first, nbytes)
            self._file.seek(at + whole)
            data = data[whole:]
        self._file.write(data)

    def close(self) -> None:
        """Close what is not the caller's."""
        self._target.close()


class WholeFiles:
    """Checkpoints of a run whose ranks have whole weights, as a strategy of Lightning's writes and reads them."""

    in_shards = False

    def state_of(self, source: Any, plain: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the module, or of an optimizer, for a checkpoint."""
        return plain(*source)

    def save(self, checkpoint: dict[str, Any], path: Any, write: Callable[..., None], options: Any) -> None:
        """Write a checkpoint."""
        write(checkpoint, path, storage_options=options)

    def load(self, path: Any, read: Callable[..., dict[str, Any]], weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint; Lightning loads what it has."""
        return read(path, weights_only=weights_only)


class ShardFiles(WholeFiles):
    """Checkpoints of a run whose ranks have shards, as Lightning's ModelParallelStrategy writes and reads them.

    That strategy's own functions do so, with the attributes that they find here. What is read is loaded at once: into
    the shards of a module that is set up, of which each rank reads its own.
    """

    in_shards = True

    def __init__(self, strategy: Any, in_folders: bool) -> None:
        """Write a folder to which each rank adds its shards, or one file with whole weights."""
        self._strategy, self._in_folders = strategy, in_folders

    def state_of(self, source: Any, plain: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        kind = ModelParallelStrategy
        return (kind.optimizer_state if source else kind.lightning_module_state_dict)(self._strategy, *source)

    def save(self, checkpoint: dict[str, Any], path: Any, write: Callable[..., None], options: Any) -> None:
        if self._in_folders and options is None:
            ModelParallelStrategy.save_checkpoint(self._strategy, checkpoint, path)
            return
        if self._strategy.is_global_zero and os.path.isdir(path):
            shutil.rmtree(path)
        write(checkpoint, path, storage_options=options)

    def load(self, path: Any, read: Callable[..., dict[str, Any]], weights_only: bool | None) -> dict[str, Any]:
        return ModelParallelStrategy.load_checkpoint(self._strategy, path, weights_only)


def local_path(path: Any) -> str | None:
    """Return the local file that Lightning means by a path or URL, or None if it is remote."""
    path = os.fspath(path)
    return os.path.abspath(local_name(path)) if is_local(path) else None


def size_so_far(path: Any) -> int:
    """Return how many bytes of a checkpoint `MappedCheckpointIO` has written so far."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        return os.fstat(_UNDER_WAY[local_path(path) or ""].fileno()).st_size
    return 0


@contextlib.contextmanager
def new_file(path: str) -> Iterator[IO[bytes]]:
    """Open a file that takes this path once the context ends without an error; errors say what is intact."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with _new_file(path) as file:
            yield file
    except (OSError, RuntimeError) as error:
        reason = error if isinstance(error, OSError) else error.__context__  # torch's writer hides the cause
        if isinstance(error, SuperpipelineError) or not isinstance(reason, OSError):
            raise
        there = os.path.exists(path)
        left = "the previous checkpoint is intact" if there else "nothing has this name, others are intact"
        raise OSError(reason.errno, f"{reason.strerror}; {left}", path) from error


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[IO[bytes]]:
    """Open a file that takes this path, replacing what is there, once the context ends without an error.

    Until then it has no name, so that nothing is left of it if the process is killed. Where the file system has no
    nameless files, it is beside the path under another name: a rename across disks would not be atomic.
    """
    folder, part = os.path.split(path)[0], f"{path}.part"
    nameless = _nameless_file(folder)
    try:
        with open(part, "w+b") if nameless is None else nameless as file:
            _UNDER_WAY[path] = file
            yield file
            file.flush()
            _sync(file.fileno())  # otherwise the disk may have the new name before it has the bytes
            if nameless is None or not _linked(file, path, part):
                os.replace(part, path)
    finally:
        _UNDER_WAY.pop(path, None)
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)
    _sync_folder(folder)


def _nameless_file(folder: str) -> IO[bytes] | None:
    """Open a file without a name in this folder; return None if its filesystem has no such files."""
    with contextlib.suppress(AttributeError, OSError):
        file = os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), "w+b")
        if os.path.exists(_by_number(file)):
            return file
        file.close()
    return None


def _linked(file: IO[bytes], path: str, part: str) -> bool:
    """Name a nameless file: by its path if that is free, else beside it, to be renamed; return whether it was free."""
    for name in (path, part, part):
        try:
            os.link(_by_number(file), name, src_dir_fd=0)  # with an argument for folders symbolic links are followed
            break
        except FileExistsError:
            if name == part:  # of a process that was killed
                os.remove(part)
    return name == path


def _by_number(file: IO[bytes]) -> str:
    return f"/proc/self/fd/{file.fileno()}"


def _sync(file: int) -> None:
    """Wait until the disk has this file's bytes, where the file system supports it."""
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


def _sync_folder(path: str) -> None:
    """Wait until the disk has this folder's file names, where possible; if not, the old or the new file is intact."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into ordinary host memory."""
    return tensor.to("cpu", copy=True)

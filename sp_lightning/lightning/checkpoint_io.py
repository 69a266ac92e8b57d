"""Checkpoint files of models that fill the host's memory."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import zipfile
from collections.abc import Container, Iterator
from typing import IO, Any

import numpy
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.serialization import config

from ..compat.lightning import is_local, local_name
from ..host.memory import private_mapping
from ..store import scratch
from ..store.files import BLOCK, DirectFile, mount_of
from .names import TorchCheckpointIO

COPIED_BY_LIGHTNING = {"state_dict", "optimizer_states", "current_model_state"}  # while it resumes
COPIED = 32 << 20  # bytes that are copied at a time from a scratch file
CANNOT_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # raised by file systems without fsync


class MappedCheckpointIO(TorchCheckpointIO):
    """Save and load checkpoints without a second copy of the model in memory.

    A local file is mapped into memory when loaded. It is written straight from the tensors into a file beside the
    previous checkpoint, which it replaces once it is complete."""

    copied_later: Container[str] | None = COPIED_BY_LIGHTNING  # entries that their reader copies; None: all

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
        if self.copied_later is None:
            return checkpoint  # type: ignore[no-any-return]
        others = {key: value for key, value in checkpoint.items() if key not in self.copied_later}
        return {**checkpoint, **apply_to_collection(others, torch.Tensor, on_host)}


class _FromScratch:
    """A file that torch saves to; whole blocks of scratch files are copied to it past the page cache."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.flush = file, file.flush
        self._target = DirectFile(str(file.name), os.dup(file.fileno()), mount_of(str(file.name)).kind)
        self._target.outcome = "The previous checkpoint is intact"
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


def local_path(path: Any) -> str | None:
    """Return the local file that Lightning means by a path or URL, or None if it is remote."""
    path = os.fspath(path)
    return os.path.abspath(local_name(path)) if is_local(path) else None


@contextlib.contextmanager
def new_file(path: str) -> Iterator[IO[bytes]]:
    """Open a file that takes this path, replacing what is there, once the context ends without an error.

    Until then it is beside it under another name. Errors say what is intact.
    """
    folder, name = os.path.split(path)
    part = os.path.join(folder, name.replace("ckpt_", "part_") + ".part")  # Lightning resumes "hpc_ckpt_1..." on SLURM
    handled = sys.exc_info()[1]  # by the caller, and no cause of errors here
    os.makedirs(folder, exist_ok=True)
    try:
        with open(part, "w+b") as file:
            yield file
            file.flush()
            _sync(file.fileno())  # otherwise the disk may have the new name before it has the bytes
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        reason = error.__context__ if type(error) is RuntimeError else error  # torch's writer hides the cause
        if reason is None or reason is handled:
            raise
        if not isinstance(reason, OSError):
            raise reason  # noqa: B904  # with the cause that it has
        there = os.path.exists(path)
        left = "the previous checkpoint is intact" if there else "nothing has this name, others are intact"
        raise OSError(reason.errno, f"{reason.strerror}; {left}", path) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)


def _sync(file: int) -> None:
    """Wait until the disk has this file's bytes, where the file system supports it."""
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into ordinary host memory."""
    return tensor.to("cpu", copy=True)

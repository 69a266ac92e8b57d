"""Checkpoint files of models that fill the host's memory."""

from __future__ import annotations

import contextlib
import errno
import os
import zipfile
from collections.abc import Container
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ..compat.lightning import is_local, local_name
from .names import TorchCheckpointIO

COPIED_BY_LIGHTNING = {"state_dict", "optimizer_states", "current_model_state"}  # while it resumes
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
        folder = os.path.dirname(local)
        os.makedirs(folder, exist_ok=True)
        part = f"{local}.part"  # in the same directory: a rename across disks would not be atomic
        try:
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                _sync(file.fileno())  # otherwise the disk may have the new name before it has the bytes
            os.replace(part, local)
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__  # torch's writer hides the cause
            if not isinstance(reason, OSError):
                raise
            raise OSError(reason.errno, f"{reason.strerror}; the previous checkpoint is intact", local) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(part)
        _sync_folder(folder)

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


def local_path(path: Any) -> str | None:
    """Return the local file that Lightning means by a path or URL, or None if it is remote."""
    path = os.fspath(path)
    return os.path.abspath(local_name(path)) if is_local(path) else None


def size_so_far(path: Any) -> int:
    """Return how many bytes of a checkpoint `MappedCheckpointIO` has written so far."""
    with contextlib.suppress(OSError):
        return os.path.getsize(f"{local_path(path)}.part")
    return 0


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

"""Checkpoint files of models that fill the host."""

from __future__ import annotations

import contextlib
import errno
import os
import zipfile
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

COPIED_BY_LIGHTNING = {"state_dict", "optimizer_states", "current_model_state"}  # out of a checkpoint, when it resumes
CANNOT_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # says a file system that has no such thing


class MappedCheckpointIO(TorchCheckpointIO):
    """Of a model that fills the host there is no room for a second copy: a local checkpoint file is mapped into memory,
    and written straight from the tensors, beside the one that it replaces once it is whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Lightning's own way, by way of memory and the directory of temporary files, for what is not local."""
        local = local_path(path)
        if storage_options is not None or local is None:
            return super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        folder = os.path.dirname(local)
        os.makedirs(folder, exist_ok=True)
        part = f"{local}.part"  # in the same directory: from another disk it could not replace the file in one go
        try:
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                _sync(file.fileno())  # else the disk may know the new name before it has the bytes
            os.replace(part, local)
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__  # torch's writer hides the system's
            if not isinstance(reason, OSError):
                raise
            raise OSError(reason.errno, f"{reason.strerror}; what was there before is whole", local) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(part)
        _sync_folder(folder)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's own way for what can not be mapped: a remote file, or one of torch's old format."""
        local = local_path(path)
        if local is None or not os.path.isfile(local) or not zipfile.is_zipfile(local):
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        checkpoint = torch.load(local, map_location=map_location, weights_only=weights_only, mmap=True)
        # Who else finds something in there may keep it, and reading it when the file is no more would end the process.
        kept = {key: value for key, value in checkpoint.items() if key not in COPIED_BY_LIGHTNING}
        return {**checkpoint, **apply_to_collection(kept, torch.Tensor, on_host)}


def local_path(path: Any) -> str | None:
    """Find the file of the system that Lightning means by this path or URL; None for one that is elsewhere."""
    path = os.fspath(path)
    return os.path.abspath(get_filesystem(path)._strip_protocol(path)) if _is_local_file_protocol(path) else None


def size_so_far(path: Any) -> int:
    """Bytes of a file that a `MappedCheckpointIO` is writing."""
    with contextlib.suppress(OSError):
        return os.path.getsize(f"{local_path(path)}.part")
    return 0


def _sync(file: int) -> None:
    """Wait until the disk has all of this file, where the file system can tell."""
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


def _sync_folder(path: str) -> None:
    """Wait until the disk has the names of this folder, where it can be opened and synced; either file is whole."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in ordinary memory."""
    return tensor.to("cpu", copy=True)

"""Private names of torch's checkpoint files.

Tried with torch 2.11 and 2.15. Without them a checkpoint's large storages could only be written as torch does it:
through the page cache, and read through their mappings, a page at a time.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable
from typing import IO, Any

import torch
from torch.serialization import DEFAULT_PROTOCOL, _save
from torch.utils.serialization import config

FINGERPRINT = ".data/serialization_id"  # the name of the last record: digits of a hash of all names, then of checksums
_DIGITS = 20


class _Records:
    """torch's writer of a zip file, but for large storages, of which it writes the headers."""

    def __init__(self, writer: Any, file: IO[bytes], large: int, hole: Callable[[int, torch.UntypedStorage], None]):
        self._writer = writer
        self._file = file
        self._large = large
        self._hole = hole

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        if nbytes < self._large or not isinstance(data, torch.UntypedStorage):
            self._writer.write_record(name, data, nbytes)
        else:
            header = self._file.tell()
            self._writer.write_record_metadata(name, nbytes)
            self._hole(header, data)


def save_with_holes(
    checkpoint: Any, file: IO[bytes], large: int, hole: Callable[[int, torch.UntypedStorage], None]
) -> None:
    """Write a checkpoint as ``torch.save`` does, without the bytes of storages of at least `large` bytes.

    Each of them is passed to `hole` with the place of its entry in the file. In the entry's bytes the file has a hole,
    and for its checksum zeros.
    """
    writer = torch._C.PyTorchFileWriter(file, True, config.save.storage_alignment)
    save: Callable[..., None] = _save
    try:
        save(checkpoint, _Records(writer, file, large, hole), pickle, DEFAULT_PROTOCOL, False)
    except BaseException:
        with contextlib.suppress(Exception):
            writer.write_end_of_file()  # else its destructor does, where an error, of a closed file, ends the process
        raise
    writer.write_end_of_file()
    file.flush()


def with_fingerprint(record: bytes, checksums: Iterable[int]) -> bytes:
    """Return the record FINGERPRINT with the hash of these checksums, those of all records with bytes, in order."""
    combined, most = 0, 2**64 - 1
    for checksum in checksums:
        combined ^= (checksum + 0x9E3779B9 + (combined << 6) + (combined >> 2)) & most
    return record[:_DIGITS] + f"{combined:0{_DIGITS}}".encode()

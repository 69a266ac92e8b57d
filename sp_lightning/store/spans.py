"""Windows over tensors: ranges of elements that are in memory together, some of them in a buffer of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .direct import BLOCK, FileRange, blocks
from .scratch import ScratchFile


@dataclass
class ElementSpan:
    """A range of a tensor's elements in the order of memory."""

    tensor: Tensor | None  # None: room for a tensor that the work makes, and assigns here to have it written
    dtype: torch.dtype
    start: int
    stop: int
    is_written: bool = True
    at: int = -1  # place in the buffer; -1: the tensor is in memory
    here: Tensor | None = None  # the elements, while the window is worked on

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


def elements_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return a range of a tensor's elements, in the order of memory, over the same bytes."""
    return tensor.as_strided((stop - start,), (1,), tensor.storage_offset() + start)


class SpanBatch(list[ElementSpan]):
    """Spans that are in memory together: a window."""

    def place(self, file: ScratchFile) -> None:
        """Give spans of the file, and spans without a tensor, places in a buffer; other spans use their tensors."""
        end = 0
        for span in self:
            if span.tensor is None or file.offset_of(span.tensor) is not None:
                span.at, end = end, end + blocks(span.nbytes)
            else:
                span.here = elements_of(span.tensor, span.start, span.stop)

    def show(self, flat: Tensor) -> None:
        """Set the elements of spans with a place in the buffer to their bytes in this one."""
        for span in self:
            if span.at >= 0:
                span.here = flat[span.at : span.at + span.nbytes].view(span.dtype)

    def ranges(self, file: ScratchFile, writes: bool) -> list[FileRange]:
        """List the ranges of the file to read before the work, or to write after it."""
        found = []
        for span in self:
            if span.at >= 0 and span.tensor is not None and (span.is_written or not writes):
                first = file.offset_of(span.tensor)
                assert first is not None
                found.append(FileRange(file, first + span.start * span.dtype.itemsize, span.nbytes, span.at))
        return found


def cut(count: int, types: Sequence[torch.dtype], room: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Cut elements into ranges that start at whole blocks and fit ``room`` bytes in tensors of all these types."""
    each, step = sum(dtype.itemsize for dtype in types), BLOCK // min(dtype.itemsize for dtype in types)
    size = max((room - len(types) * BLOCK) // each // step, 1) * step
    while start < count:
        yield start, min(start + size, count)
        start += size

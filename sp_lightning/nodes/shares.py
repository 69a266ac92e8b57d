"""The elements of each tensor that a rank owns: it sums their gradients, and steps them.

1. A node's ranks divide a tensor's elements, in the order of memory. With several nodes the same local rank of each of
   them owns the same elements, and these are divided among the nodes, each of which has a *share*. Small tensors go to
   each node in turn.
2. Ranges and shares begin at a multiple of `LINE` elements: ends of vectorized loops have other bits. For the same
   reason half precision is not cut: the first rank of a node owns it, and one of the nodes has all of it as its share.
3. Ranges of a tensor of more than `CUT` elements begin at a multiple of that: so they are whole blocks of a file in
   which the tensor begins at a block (sharded_step.py, Rule 7).
"""

from __future__ import annotations

import math

from torch import Tensor

from ..memory.layout import Field

LINE, CUT = 256, 1024
HALF = 2  # bytes of an element in half precision


def owned(field: Field, rank: int, size: int) -> slice:
    """Return the elements of a tensor that a rank of a node owns (Rule 1)."""
    return divided(_numel(field), rank, size if _is_cut(field) else 1, CUT if is_large(field) else LINE)


def share(field: Field, index: int, numel: int, node: int, nodes: int) -> slice:
    """Return a node's share of as many elements, which one of its ranks owns of a unit's parameter (Rule 1)."""
    return divided(numel, (node + index) % nodes, nodes if _is_cut(field) else 1)


def is_large(field: Field) -> bool:
    """Whether ranges of a tensor are whole blocks of a file in which it begins at a block (Rule 3)."""
    return _numel(field) > CUT


def divided(numel: int, number: int, count: int, line: int = LINE) -> slice:
    """Return the part of this number when elements are divided into ``count`` (Rule 2)."""
    part = math.ceil(math.ceil(numel / count) / line) * line
    return slice(min(number * part, numel), min((number + 1) * part, numel))


def flat(memory: Tensor, field: Field, part: slice) -> Tensor:
    """Make a flat tensor over some elements of a field in a slab."""
    elements = memory[field.offset : field.offset + field.nbytes].view(field.dtype)
    return elements[part]


def _numel(field: Field) -> int:
    return field.nbytes // field.dtype.itemsize


def _is_cut(field: Field) -> bool:
    return field.dtype.itemsize > HALF

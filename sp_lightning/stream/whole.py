"""A parameter that consists of several tensors, none of which is trained: a quantised one, of any library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn


@dataclass(eq=False, frozen=True)
class Whole:
    """A parameter that consists of several tensors, which are weights of its unit."""

    name: str
    parameter: nn.Parameter
    form: Any  # how it is made again of its parts
    parts: tuple[tuple[str, Any], ...]  # with their names
    is_shard: ClassVar[bool] = False  # whether it is a DTensor, whose only part is this process's shard (sharded.py)

    def shard_name(self) -> str:
        """Say which shard this process has."""
        return "all of it"


def part_of(whole: Whole) -> Tensor:
    """Return the only part of a shard."""
    [(_, part)] = whole.parts
    return part  # type: ignore[no-any-return]

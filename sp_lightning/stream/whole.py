"""A parameter that consists of several tensors, none of which is trained: a quantised one, of any library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..errors import UnsupportedError


@dataclass(eq=False, frozen=True)
class Whole:
    """A parameter that consists of several tensors, which are weights of its unit (partition.py, rule 10)."""

    name: str
    parameter: nn.Parameter
    form: Any  # how it is made again of its parts
    parts: tuple[tuple[str, Any], ...]  # with their names
    is_shard: ClassVar[bool] = False  # whether it is a DTensor, whose only part is this process's shard (sharded.py)

    def begin(self) -> None:
        """Begin to stream: the parts are in their homes."""

    def shard_name(self) -> str:
        """Say which shard this process has."""
        return "all of it"

    def follow(self) -> None:
        """Note which parameters train now; raise if this one is to be trained: no gradient comes back through it."""
        if self.parameter.requires_grad:
            raise UnsupportedError(
                f"requires_grad of {self.name} was set to True, but it is a {type(self.parameter).__name__}, which "
                "consists of several tensors: it can be streamed, but not trained. Train adapters, or a plain parameter"
            )

    def end(self) -> None:
        """End streaming: the parameter is plain again."""


def part_of(whole: Whole) -> Tensor:
    """Return the only part of a shard."""
    [(_, part)] = whole.parts
    return part  # type: ignore[no-any-return]

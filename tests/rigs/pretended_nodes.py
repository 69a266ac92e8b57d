"""Pretended nodes: parts of this machine's ranks that take each other for ranks of another machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

NODES = "PRETENDED_NODES"


def count() -> int:
    """Return how many nodes this rank's Trainer is to be told of."""
    return int(os.environ.get(NODES, 1))


def rank() -> int:
    """Return this rank's number among those of all nodes."""
    here = int(os.environ["WORLD_SIZE"]) // count()
    return int(os.environ.get("NODE_RANK", 0)) * here + int(os.environ["LOCAL_RANK"])


@contextlib.contextmanager
def pretending(node: int) -> Iterator[None]:
    """Have this process connect as a rank of the node of this number, as of torchrun's agent."""
    with mock.patch.dict(os.environ, {"GROUP_RANK": str(node)}):
        yield


def trainer(nodes: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function that makes a Trainer, or Fabric, in the environment that a launcher would make on each node."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    here = size // nodes
    place = {"LOCAL_RANK": str(rank % here), "NODE_RANK": str(rank // here), NODES: str(nodes)}
    with pretending(rank // here), mock.patch.dict(os.environ, place):
        return function(*args, **kwargs)

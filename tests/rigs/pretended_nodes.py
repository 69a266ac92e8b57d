"""Pretended nodes: parts of this machine's ranks that take each other for ranks of another machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from sp_lightning.nodes.transport import PRETENDED, WORDS, NodeTransport
from sp_lightning.ranks import connection

NODES = "PRETENDED_NODES"


def count() -> int:
    """Return how many nodes this rank's Trainer is to be told of."""
    return int(os.environ.get(NODES, 1))


def rank() -> int:
    """Return this rank's number among those of all nodes."""
    here = int(os.environ["WORLD_SIZE"]) // count()
    return int(os.environ["NODE_RANK"]) * here + int(os.environ["LOCAL_RANK"])


def run(nodes: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function on this rank (processes.py, Rule 1), one of so many nodes with as many ranks each."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    with pretending(rank * nodes // size):
        return function(*args, **kwargs)


@contextlib.contextmanager
def pretending(node: int) -> Iterator[None]:
    """Have this process connect as a rank of the node of this number."""
    with (
        mock.patch.dict(os.environ, {PRETENDED: str(node)}),
        mock.patch.object(connection.socket, "gethostname", lambda: f"host{node}"),
    ):
        yield


def trainer(nodes: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function that makes a Trainer, or Fabric, in the environment that a launcher would make on each node."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    here = size // nodes
    place = {"LOCAL_RANK": str(rank % here), "NODE_RANK": str(rank // here), NODES: str(nodes)}

    def on_its_node() -> Any:
        with mock.patch.dict(os.environ, place):
            return function(*args, **kwargs)

    return run(nodes, on_its_node)


def late_words(nodes: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function as `trainer` does, on ranks of which the second hears words of others later than all else."""
    take = NodeTransport._take

    def late(transport: NodeTransport, node: int, tensor: Any, tag: int) -> bool:
        is_taken = take(transport, node, tensor, tag)
        if tag == WORDS and rank() == 1:
            time.sleep(0.1)
        return is_taken

    def patched(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(NodeTransport, "_take", late):
            return function(*args, **kwargs)

    return trainer(nodes, patched, *args, **kwargs)

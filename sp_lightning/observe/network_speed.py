"""The speed of the network between machines, as sums of gradients find it: through the transport that carries them.

1. All processes of all nodes send at once, each to its rail, and receive as many bytes meanwhile, as in a step.
2. Messages are of the size of a large unit's, and as many as fill the time at the rate of the first ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..nodes.transport import PARTS, same_for_all
from ..ranks.board import Ranks
from ..ranks.connection import connect

PART = 32 << 20  # bytes of a message
FIRST = 2  # messages from whose rate the others are counted
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class NetworkSpeed:
    """The bytes per second that nodes send to all others together, while as many come from each (Rule 1)."""

    hosts: tuple[str, ...]  # one for each node
    devices: int  # processes of each node
    sent_bytes_per_s: tuple[float, ...]  # by each node

    @property
    def bytes_per_s(self) -> float:
        """The rate of the slowest node, for which the others wait."""
        return min(self.sent_bytes_per_s)


def measure_network(group: Any, seconds: float) -> NetworkSpeed | None:
    """Measure for about ``seconds``; every rank of a group calls this. None: all are on one node."""
    ranks = connect(group, torch.device("cpu"), TIMEOUT, None)
    try:
        if not isinstance(ranks, Ranks) or ranks.transport is None:
            return None
        transport = ranks.transport
        part = torch.zeros(PART, dtype=torch.uint8, device="cpu")
        transport.drains = True

        def sent_s(number: int, count: int) -> float:
            """Send and receive ``count`` messages; return the seconds that it took."""
            ranks.meet("a measurement of the network")
            began = time.perf_counter()
            keys = [(0, number, at) for at in range(count)]
            sent = [transport.send(PARTS, key, same_for_all(part.clone)) for key in keys]
            for key, message in zip(keys, sent, strict=True):
                ranks.wait_for_nodes(
                    lambda key=key, message=message: (  # type: ignore[misc]
                        transport.missing(PARTS, key) or ([] if message.is_packed else list(transport.peers.values()))
                    ),
                    "messages that measure the network",
                )
                transport.take(PARTS, key)
            return time.perf_counter() - began

        counts: list[Any] = [None] * ranks.world
        dist.all_gather_object(counts, max(FIRST, round(seconds * FIRST / sent_s(0, FIRST))), group)
        count = min(counts)
        rates: list[Any] = [None] * ranks.world
        rate = count * PART * len(transport.peers) / sent_s(1, count)
        dist.all_gather_object(rates, rate, group)
        size = ranks.size
        return NetworkSpeed(
            hosts=ranks.place.hosts,
            devices=size,
            sent_bytes_per_s=tuple(sum(rates[first : first + size]) for first in range(0, ranks.world, size)),
        )
    finally:
        ranks.close()

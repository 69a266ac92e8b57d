"""Pieces of a step's work and of its waiting: what a timeline is made of, whether it was measured or simulated."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Lane = Literal["up", "compute", "down", "optimizer", "host"]
LANES: tuple[Lane, ...] = get_args(Lane)  # "optimizer" is the thread that steps, "host" the one that launches


class Span(NamedTuple):
    """A piece of work in a lane, or of waiting, between two moments in seconds."""

    lane: Lane
    unit: str
    start: float
    end: float
    phase: str = ""  # of the unit: "forward" or "backward"; of a copy: "weights", "gradients" or "activations"
    stall: str = ""  # what was waited for; empty where work was done
    nbytes: int = 0  # that a copy moved

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

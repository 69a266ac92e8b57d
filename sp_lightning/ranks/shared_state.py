"""Optimizer state of a unit's weights in memory that ranks share: whole for the user, in parts for steps.

Each kind of state of each optimizer has a range of the memory, in the order in which steps first make it. The ranges
are reserved with the unit, because ranks step units in different orders.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, optim

from ..errors import UnsupportedError
from ..host.device import aligned
from ..optim.filed import is_shaped
from ..stream.leaf import Weight
from ..stream.unit import Unit
from .shared_slabs import Twin
from .team import Team

KINDS = 64  # kinds of state that a unit may have
LARGEST = 8  # bytes of an element of state


class Entry:
    """A tensor of a weight's optimizer state in shared memory."""

    def __init__(self, twin: Twin, face: Tensor, part: Tensor) -> None:
        self.twin, self.face = twin, face  # the user has the face
        self.part = part  # this rank's part of the truth
        self.version = face._version  # differs once the user has written to the face


class SharedState:
    """The optimizer state of one unit's weights, in ranges of memory that ranks share."""

    def __init__(self, unit: Unit, team: Team) -> None:
        self._unit, self._team = unit, team
        self._places, self._nbytes = dict[Weight, int](), 0
        for weight in unit.weights:
            self._places[weight] = self._nbytes
            self._nbytes += aligned(weight.value.numel() * LARGEST)
        self._free = [team.slabs.reserve(self._nbytes) for _ in range(KINDS)]
        self._twins: dict[Any, Twin] = {}  # by optimizer and kind
        self._entries: dict[Any, dict[str, Entry]] = {}  # by weight and optimizer
        self._edited: list[Twin] = []

    def _entry(self, weight: Weight, optimizer: optim.Optimizer, key: str, dtype: torch.dtype) -> Entry:
        """Return the shared memory of one kind of a weight's state, mapped at its first use."""
        kind = weakref.ref(optimizer), key
        entries = self._entries.setdefault((weight, kind[0]), {})
        if key not in entries:
            if kind not in self._twins:
                if not self._free:
                    raise UnsupportedError(
                        f"optimizers keep more than {KINDS} kinds of state for a unit: use fewer at a time"
                    )
                self._twins[kind] = self._team.slabs.at(self._free.pop(0), self._nbytes)
            twin = self._twins[kind]
            face = twin.tensor(self._places[weight], weight.value, dtype)
            entries[key] = Entry(twin, face, self._team.part_of(twin.truth_of(face)))
        return entries[key]

    def detach_taken(self, weight: Weight, optimizer: optim.Optimizer, own: dict[str, Any]) -> None:
        """Copy tensors that the user took out of a weight's state to memory of their own: a step overwrites theirs."""
        entries = self._entries.get((weight, weakref.ref(optimizer)), {})
        for key, entry in list(entries.items()):
            if own.get(key) is not entry.face:
                self._unit.wait_step()
                entry.face.data = entry.face.clone()
                del entries[key]

    def publish_edits(self) -> None:
        """Copy this rank's parts of what the user wrote to the state to the truth, also of weights that do not step."""
        for entry in (entry for entries in self._entries.values() for entry in entries.values()):
            if entry.face._version != entry.version:
                self._publish(entry, entry.face)

    def _publish(self, entry: Entry, value: Tensor) -> None:
        """Copy this rank's part of a value to the truth of an entry, whose face is to show it."""
        entry.part.copy_(self._team.part_of(value))
        entry.version = entry.face._version
        self._edited.append(entry.twin)

    def take_parts(self, weight: Weight, optimizer: optim.Optimizer, own: dict[str, Any]) -> dict[str, Any]:
        """Return a weight's state cut to this rank's parts, which have what the user wrote to the state or replaced."""
        parts = dict(own)
        for key, value in own.items():
            if not is_shaped(value, weight.value):
                continue
            entry = self._entry(weight, optimizer, key, value.dtype)
            if value is not entry.face or value._version != entry.version:
                if value.stride() != entry.face.stride():
                    value = torch.empty_like(entry.face).copy_(value)
                self._publish(entry, value)
            own[key], parts[key] = entry.face, entry.part
        return parts

    def put_back(self, weight: Weight, optimizer: optim.Optimizer, made: dict[str, Any], own: dict[str, Any]) -> None:
        """Put the state that a step of this rank's parts returned into the user's state, as whole tensors."""
        for key, value in made.items():
            own[key] = value
            if isinstance(value, Tensor) and value.ndim:
                entry = self._entry(weight, optimizer, key, value.dtype)
                if value is not entry.part:
                    entry.part.copy_(value)
                own[key] = entry.face

    def show_truth(self) -> None:
        """Give up this rank's own pages of the state: the user sees the truth, which has the user's edits by now."""
        while self._edited:
            self._edited.pop().drop_edits()

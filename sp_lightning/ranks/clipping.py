"""Clipping of gradients that all ranks share: every rank finds the factor, and the owners multiply, once.

1. torch's `clip_grad_norm_` multiplies each ``.grad`` in place. On each rank's face (shared_memory.py) that would be a
   private copy of all gradients. So the factor is kept, and the owners multiply what they own of the shared gradients
   when an optimizer steps (sharded_step.py), after all ranks met: the same product of each element.
2. This rank does not see the product before that. So its own gradient is multiplied at once as well if anything could
   tell: if ``.grad`` is not the mean's face, if code other than torch's function refers to it, or if this rank wrote to
   any gradient of the unit or may write to one that code refers to, since a page of its own has old bytes of the
   gradients beside that one. A mean that is no longer ``.grad``, and that code refers to, gets pages of its own, since
   owners multiply the shared bytes.
3. Before user code reads or replaces a gradient, and before a backward, which may add to it, this rank multiplies all
   that it does not see yet. Other ranks may still not see it: owners multiply all the same. They do so until the next
   exchange, to which all ranks come with what they have multiplied: a backward without one may be this rank's alone.
4. While the exchange of a backward is yet to come, a hook in it clips what this rank has for itself, as under DDP: that
   is multiplied at once, and the mean of such products not again.
5. Ranks that clip differently would step with different gradients: at the step, this is an error (user_edits.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..memory.access import Access
from ..memory.host_copy import HostCopy
from ..memory.watched_parameters import HostParameter, true_dtype, true_grad
from ..nodes.shares import flat, owned
from ..optim.host_gradients import multiplied_later
from .board import Ranks
from .exchange import Exchange
from .user_edits import Alike

Place = tuple[HostCopy, int]  # of a parameter: its unit, and its number there


class Clipping:
    """Factors by which one model's gradients were clipped, until the owner of each gradient multiplies it by them."""

    def __init__(self, ranks: Ranks, exchange: Exchange, stores: Sequence[HostCopy], access: Access) -> None:
        self._ranks, self._exchange, self._access = ranks, exchange, access
        self._places: dict[int, Place] = {
            id(parameter): (store, index) for store in stores for index, parameter in enumerate(store.params)
        }
        self._numbers = {place: number for number, place in enumerate(self._places.values())}
        self._factors: defaultdict[Place, list[Tensor]] = defaultdict(list)  # in the order of the calls
        self._unseen: dict[Place, Tensor] = {}  # those of gradients that this rank has not multiplied (Rule 2)
        multiplied_later.add(self)

    def close(self) -> None:
        """Multiply the gradients that this rank has not multiplied yet, and take no more factors. Safe twice."""
        self.show()
        multiplied_later.discard(self)

    def keep(self, parameters: Iterable[Tensor], factor: Tensor, references: int) -> list[Tensor]:
        """Store a factor for these parameters' gradients; return the parameters whose gradients are multiplied now."""
        self.show()  # of several factors only the last would be known as unseen; torch's own clipping reads before it
        of_units: defaultdict[HostCopy, list[int]] = defaultdict(list)
        at_once: list[Tensor] = []
        for parameter in parameters:
            place = self._places.get(id(parameter))
            if place is None or self._exchange.active or true_grad(parameter) is None:  # Rule 4
                at_once.append(parameter)
            elif not self._exchange.is_mean(*place):  # but it may show the mean, on this rank alone
                self._exchange.keep_old_bytes(*place)  # before it is said below whether this rank has pages of its own
                self._factors[place].append(factor)
                at_once.append(parameter)
            else:
                of_units[place[0]].append(place[1])
        for store, indices in of_units.items():
            unseen = self._exchange.unseen(store, indices, references)
            for index in indices:
                self._factors[store, index].append(factor)
                parameter = store.params[index]
                if index in unseen and type(parameter) is HostParameter and true_dtype(parameter) is factor.dtype:
                    self._unseen[store, index] = factor
                    self._access.gradients.add(self)
                else:
                    at_once.append(parameter)
        return at_once

    def show(self) -> None:
        """Multiply the gradients that this rank's user is about to read or to replace (Rule 3)."""
        unseen, self._unseen = self._unseen, {}
        with torch.inference_mode(False), torch.no_grad():
            for (store, index), factor in unseen.items():
                grad = true_grad(store.params[index])
                assert grad is not None
                grad.mul_(factor)
        self._access.gradients.discard(self)

    def forget(self) -> None:
        """Have owners multiply no more what came before an exchange, which every rank has multiplied (Rule 3)."""
        self._factors.clear()

    def is_clipped(self, store: HostCopy, index: int) -> bool:
        """Whether owners have to multiply a gradient yet."""
        return (store, index) in self._factors

    def clipped(self, store: HostCopy, index: int, mean: Tensor) -> Tensor:
        """Return a shared gradient times the factors that its owners have not applied yet; do not change it."""
        for factor in self._factors.get((store, index), ()):
            mean = mean.mul(factor)
        return mean

    def described(self) -> Alike:
        """Describe the factors, for a comparison between ranks (Rule 5)."""
        found = sorted((self._numbers[place], [factor.item() for factor in of]) for place, of in self._factors.items())
        return Alike("clipped gradients in different ways", f"clipped {len(found)} of them", repr(found).encode())

    def multiply(self) -> None:
        """Multiply the shared gradients that this rank owns (Rule 1)."""
        factors = dict(self._factors)
        self._factors.clear()
        self._unseen.clear()
        with torch.inference_mode(False), torch.no_grad():
            for (store, index), of in factors.items():
                field = store.host_layout.fields[index]
                shared = flat(self._exchange.truth(store), field, owned(field, self._ranks.rank, self._ranks.size))
                for factor in of:
                    shared.mul_(factor)
        self._access.gradients.discard(self)

"""Parameters of which this process has a shard: DTensors, as torch's tensor parallelism makes them.

1. The DTensor stays the user's parameter, in all places and in the optimizer. Its local tensor, the shard, travels with
   its unit like any weight. The leaf is a DTensor over the shard's bytes on the device, so autograd sums its uses, in
   their layouts, as in a plain run.
2. No layout is changed on the way down: a gradient that is a partial sum stays this rank's own over all accumulated
   batches. `.grad` is a DTensor over the gradient of the shard. Gradients of two layouts for one sum are refused: torch
   would choose the layout of the sum by the operator. A gradient of another shape than the shard's (of a vocabulary
   that is cut, torch makes the whole one on each rank) comes down by itself, at once.
3. An optimizer steps the DTensors by its own code on the host, and so are gradients clipped: norms are those of the
   mesh, by its group, which needs a backend for the host's tensors. State is what torch makes of the DTensors.
4. Where an operator writes to a DTensor, torch moves the version of the DTensor alone, or none (`_foreach_add_`); where
   one writes to the shard, that of the shard. After each the bytes on the device are stale.
5. Of several devices those of a group have the same shards: the mean of their gradients. As under DDP over local
   tensors (`DTensor.from_local`), a gradient is first laid out as the parameter is, in each backward: the mean of
   partial sums is none that any plain run has.

A shard travels in its own type: autocast casts it on the device, at each use, as in a plain run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compat.streaming import without_dispatch
from ..compat.tensors import IS_PARAMETER, laid_out, local_of, over_spec, spec_of
from ..errors import UnsupportedError
from .lazy import grad_of, set_grad
from .leaf import Weight
from .partition import Slot
from .sharded import Sharded
from .whole import part_of


class ShardWeight(Weight):
    """A DTensor of the user's, the shard that travels for it, and the DTensor that stands for it on the device."""

    is_shard = True

    def __init__(self, whole: Sharded, slots: list[Slot], in_a_group: bool) -> None:
        self.shard = part_of(whole)
        super().__init__(whole.name, whole.parameter, slots, whole.parameter.dtype)
        self.nbytes = self.shard.nbytes
        self.spec = whole.form.spec
        self._as_parameter = in_a_group  # whether gradients are laid out as the parameter is (Rule 5)
        self._spec_of_gradient: Any = None  # of the gradient that is under way

    @property
    def bytes_of_host(self) -> Tensor:
        return self.shard

    def leaf_over(self, there: Tensor) -> Any:
        """Make the leaf."""
        leaf = over_spec(there, self.spec)
        setattr(leaf, IS_PARAMETER, True)
        return leaf

    def received(self, grad: Tensor) -> Tensor | None:
        """Return this rank's part of a gradient that arrived in backward; None: it is on the host already (Rule 2)."""
        if self._as_parameter:
            grad = grad.redistribute(placements=self.spec.placements)  # type: ignore[attr-defined]
        spec = spec_of(grad)
        with without_dispatch():
            there = grad_of(self.host)
        if there is not None and spec_of(there).placements != spec.placements:
            raise UnsupportedError(
                f"the gradient of {self.name} arrived as {spec.placements}, where the one that it would be added to is"
                f" {spec_of(there).placements}: call zero_grad() between them"
            )
        self._spec_of_gradient = laid_out(spec, self.spec)
        local = local_of(grad).detach()
        if local.shape == self.value.shape:
            return local
        self._add(local.to("cpu"))
        return None

    def deposit(self, content: Any, is_sum: bool) -> None:
        """Put a gradient into `.grad`, or add it to what is there unless it is the sum; waits for its bytes."""
        with torch.no_grad():
            self._add(content.settle(), content if is_sum else None)

    def _add(self, local: Tensor, content: Any = None) -> None:
        with without_dispatch():
            there = grad_of(self.host)
            if there is not None and content is None:
                local_of(there).add_(local)
                there.content = None
                return
            made: Any = over_spec(local, self._spec_of_gradient or laid_out(self.spec, self.spec))
            made.content = content
            set_grad(self.host, made)


def on_host(grad: Tensor) -> Tensor:
    """Return a DTensor that the user assigns as a gradient, over a shard on the host."""
    local = local_of(grad)
    return grad if local.device.type == "cpu" else over_spec(local.cpu(), spec_of(grad))

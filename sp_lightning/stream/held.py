"""Units that stay on the device: their truth is there, or on the host beside weights of a narrower type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..compat.torch import without_dispatch
from ..host.device import dense_strides
from .lazy import set_data
from .leaf import Weight
from .residency import Presence, show_versions
from .unit import Unit, have_other_bytes


class HeldUnit(Unit):
    """Weights that stay on the device in the type that computes, while the host has and steps the true ones."""

    is_held = True

    def show(self, here: Any = None) -> None:
        """Show the weights in the leaves, after loading the unit again if the host's weights have changed."""
        if self.is_stale():
            self.evict()
        super().show(here)


class ResidentUnit(Unit):
    """Weights whose truth stays on the device; the host gets their bytes when they are read."""

    is_held = is_resident = True

    def _allocate(self) -> None:
        """Allocate no slab: the host gets memory for a weight when that weight is read."""

    def _take_bytes(self, weight: Weight) -> None:
        """Keep a parameter's bytes for the first load, and give the parameter an empty storage on the host."""
        host = weight.host
        weight.wire = torch.empty_strided(host.shape, dense_strides(host.data), dtype=host.dtype, device="cpu")
        weight.wire.untyped_storage().resize_(0)
        self.sources.append(host.data)
        host.data = weight.wire
        weight.value = host.detach()
        weight.is_ahead = True

    def replace(self, weight: Weight, host: Any) -> None:
        """Put another parameter of the same form in a weight's place, and copy its bytes to the device."""
        super().replace(weight, host)
        with torch.no_grad():
            self._on_device(weight).copy_(self.sources.pop())

    def load(self, here: Any) -> None:
        """Copy the weights up, and drop the host's bytes."""
        self.memory.allocate(here)
        self.device.counters.nbytes["up"] += self.nbytes
        with without_dispatch(), torch.no_grad(), torch.inference_mode(False):
            for weight, source in zip(self.weights, self.sources, strict=True):
                self._on_device(weight).copy_(source)
        self.sources.clear()
        self.memory.arrived = here.record_event()
        self._stamp = self._now()

    def _on_device(self, weight: Weight) -> Tensor:
        """Return a weight's range of the unit's device memory."""
        return self.memory.flat.view(weight.dtype).as_strided(*weight.form)

    def show(self, here: Any = None) -> None:
        """Show the weights in the leaves, after copying up those that the host has written."""
        if self.memory.state is not Presence.ABSENT and self.is_stale():
            self._refresh()
        super().show(here)

    def is_stale(self) -> bool:
        """Whether versions of the host's weights have moved since the device last had the same bytes."""
        return self._stamp != self._now()

    def _refresh(self) -> None:
        """Copy weights that the host has written to the device, into the same memory under the same leaves."""
        self._stamp = self._now()
        with without_dispatch(), torch.no_grad(), torch.inference_mode(False):
            for weight, version in zip(self.weights, self._stamp[1], strict=True):
                if weight.is_ahead:
                    continue
                # A graph kept for double backward may share the memory: do not write equal bytes.
                there, new = self._on_device(weight), weight.value.to(self.memory.flat.device)
                if version != weight.shown or have_other_bytes(there, new):
                    there.copy_(new)
            show_versions(self.weights, self._stamp[1])

    def evict(self) -> None:
        """Copy all weights to the host, and release the memory on the device, at the end of the stream. Blocks.

        A unit that was never loaded gets back the bytes that it kept.
        """
        with without_dispatch():
            for weight, source in zip(self.weights, self.sources, strict=False):  # the device had no memory for them
                set_data(weight.host, source)
                weight.is_ahead = False
        for weight in self.weights:
            self.before_host_access(weight)
        super().evict()

    def before_host_access(self, weight: Weight) -> None:
        """Copy a weight's bytes to the host if the device has newer ones. Blocks."""
        if weight.is_ahead:
            if self.memory.state is Presence.ABSENT:
                self.show()
            self.wait_step()
            weight.is_ahead = False
            storage = weight.wire.untyped_storage()
            if not storage.nbytes():
                storage.resize_(weight.nbytes)
            with without_dispatch(), torch.no_grad():
                weight.wire.copy_(self._on_device(weight))
        self.window.look_again(self)

    def keep_write(self, weight: Weight) -> None:
        """Note that the device has newer bytes of a weight than the host."""
        weight.is_ahead = True
        with without_dispatch():
            increment_version(weight.value)
        weight.shown = weight.value._version
        self._stamp = self._now()

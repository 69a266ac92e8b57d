"""A key-value cache that waits on the host: between two uses of a layer its keys and values are not on the device.

1. At most three layers are on the device: the one in use, the next one, on its way up, and the last one, on its way
   down. Three streams are ordered by events, and no code waits on the host but for `reorder_cache` and its relatives.
2. Device memory is allocated and freed on the caller's stream: a tensor is dropped after that stream has waited for its
   copy down, and the up stream waits for the kernels that may still use the memory that it fills.
3. Whole layers travel, so any cache of transformers will do whose layers have ``keys`` and ``values`` and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

NAMES = ("keys", "values")
PIECE = 1 << 20  # bytes by which host buffers grow


class HostCache(Cache):  # type: ignore[misc]
    """The part of a cache on the host that moves layers; `on_host` gives it to a cache."""

    def _begin(self) -> None:
        self._up: Any = None  # streams, made with the first layer that arrives from a device
        self._down: Any = None
        self._last: int | None = None  # the layer that is on the device since its use
        self._coming: dict[int, Any] = {}  # layers on their way up: the event after which they are there
        self._leaving: list[tuple[Any, list[Tensor]]] = []  # tensors on their way down, and their event (Rule 2)
        self._arrived: dict[int, Any] = {}  # by layer: the event after which its bytes are on the host
        self._buffers: dict[tuple[int, str], Tensor] = {}  # page-locked

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append to a layer, which is brought up if it is not there yet; send the last one down and fetch the next."""
        device = key_states.device
        if device.type == "cpu":
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._up is None:
            self._up, self._down = torch.Stream(device=device), torch.Stream(device=device)
        compute = torch.accelerator.current_stream(device)
        self._let_go(compute)
        if self._last not in (None, layer_idx):
            self._send(self._last, compute)
        if layer_idx < len(self.layers):
            self._fetch(layer_idx, device, compute)
        if layer_idx in self._coming:
            self._coming.pop(layer_idx).wait(compute)
        result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        _check(self.layers[layer_idx])
        self._last = layer_idx
        self._fetch((layer_idx + 1) % len(self.layers), device, compute)
        return result

    def _send(self, index: int, compute: Any) -> None:
        """Start a layer's way down; what uses it is queued on the caller's stream."""
        layer, sources = self.layers[index], []
        self._down.wait_event(compute.record_event())
        with self._down:
            for name in NAMES:
                source = getattr(layer, name)
                place = self._place(index, name, source)
                place.copy_(source, non_blocking=True)
                setattr(layer, name, place)
                sources.append(source)
        self._arrived[index] = self._down.record_event()
        self._leaving.append((self._arrived[index], sources))

    def _let_go(self, compute: Any) -> None:
        """Drop what went down, in the order of the caller's stream (Rule 2)."""
        for arrived, _ in self._leaving:
            arrived.wait(compute)
        self._leaving.clear()

    def _place(self, index: int, name: str, source: Tensor) -> Tensor:
        """Return page-locked memory for a tensor: the layer's own, which grows with the text."""
        buffer = self._buffers.get((index, name))
        if buffer is None or buffer.numel() < source.nbytes:
            nbytes = -(-max(source.nbytes, 1) // PIECE) * PIECE
            self._buffers[index, name] = buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return buffer[: source.nbytes].view(source.dtype).view(source.shape)

    def _fetch(self, index: int, device: torch.device, compute: Any) -> None:
        """Start a layer's way up if it is on the host."""
        layer = self.layers[index]
        if not getattr(layer, "is_initialized", False) or layer.keys.device == device:
            return
        hosts = [getattr(layer, name) for name in NAMES]
        tensors = [torch.empty_like(host, device=device) for host in hosts]
        self._up.wait_event(compute.record_event())
        if index in self._arrived:
            self._arrived[index].wait(self._up)
        with self._up:
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host, non_blocking=True)
        self._coming[index] = self._up.record_event()
        for name, tensor in zip(NAMES, tensors, strict=True):
            setattr(layer, name, tensor)

    def _settle(self) -> None:
        """Wait until no layer is on its way: other code reads or writes all of them."""
        for event in (*self._arrived.values(), *self._coming.values()):
            event.synchronize()
        self._arrived.clear()
        self._coming.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._settle()
        super().reorder_cache(beam_idx)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super().crop(*args, **kwargs)

    def reset(self) -> None:
        self._settle()
        super().reset()


def on_host(cache: Cache) -> Cache:
    """Have a cache's layers wait on the host between their uses, and return the cache."""
    if cache.offloading:
        raise ValueError("the cache offloads its layers already; make it without offloading")
    for layer in cache.layers:
        _check(layer)
    kind = type(cache)
    cache.__class__ = type(f"Host{kind.__name__}", (HostCache, kind), {})
    cache._begin()
    return cache


def host_cache(config: Any) -> Cache:
    """Return an empty cache on the host for a model of this config."""
    return on_host(DynamicCache(config=config))


def _check(layer: Any) -> None:
    """Refuse a layer that keeps other tensors than keys and values: they would stay on the device (Rule 3)."""
    others = [name for name in ("update_conv_state", "update_indexer", "_quantize") if hasattr(layer, name)]
    if others:
        raise ValueError(
            f"a cache with layers of {type(layer).__name__} cannot wait on the host: they keep more than keys"
        )

"""The stand-in for DistributedDataParallel around a model of which several ranks stream one host copy.

1. Scripts for several ranks meet DDP's wrapper: they ask for its type, read ``model.module``, and its names are those
   of a stock checkpoint. So accelerate and scripts make it, and get this kind of it for a model that streams. Its
   gradients are exchanged, and its weights shared, without the wrapper (sp_lightning/ranks).
2. As in DDP, the last forward through the wrapper that records gradients decides whether the next backward exchanges
   them, by ``require_backward_grad_sync``, and one of the model inside waits for nobody.
3. As in DDP, such a forward, and the first one after it, give all ranks the first one's buffers.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UnsupportedError
from ..ranks.board import OneRank
from ..ranks.connection import broadcast_buffers
from ..runtime.handle import Handle


class Streams(Protocol):
    """The context that streams models (before.py)."""

    ranks: OneRank

    def handle_of(self, module: nn.Module) -> Handle | None: ...


class RankedModel(DistributedDataParallel):
    """A streamed model in DDP's wrapper."""

    static_graph = False  # which code asks DDP that runs a batch in parts
    find_unused_parameters = True

    def __init__(self, module: nn.Module, stream: Streams, sends_buffers: bool) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.device = self.handle_in(stream).device.torch_device
        self.stream = stream
        self._sends_buffers = sends_buffers and next(module.buffers(), None) is not None  # at the beginning
        self.require_forward_param_sync = True
        self.require_backward_grad_sync = True
        self.reducer = _Reducer(self)  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, with the first rank's buffers where DDP's has them (Rule 3)."""
        handle = self.handle_in(self.stream)
        self.stream.ranks.check()
        if self._sends_buffers and self.require_forward_param_sync:
            broadcast_buffers(self.module, self.stream.ranks, None, self.device)
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            handle.exchanges = self.require_backward_grad_sync
        return self.module(*args, **kwargs)

    def handle_in(self, stream: Streams) -> Handle:
        """Return the handle that streams the model."""
        handle = stream.handle_of(self.module)
        if handle is None:
            raise UnsupportedError(
                f"{type(self.module).__name__} was wrapped for several ranks while its weights streamed, and they no "
                "longer do: train and evaluate inside the context, and call the model itself after it"
            )
        return handle

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Refuse what would change how gradients are summed."""
        raise UnsupportedError("a streamed model has no DDP to give a communication hook: leave comm_hook out")

    def join_hook(self, **_: Any) -> NoReturn:
        """Refuse ranks with unlike numbers of batches."""
        raise UnsupportedError("ranks of a streamed model need the same number of batches: leave join out")

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse ranks with unlike numbers of batches."""
        self.join_hook()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError("the wrapper of a streamed model cannot be copied: copy accelerator.unwrap_model(model)")


class _Reducer:
    """The part of DDP's reducer with which accelerate exchanges gradients of forwards in ``no_sync``."""

    def __init__(self, model: RankedModel) -> None:
        self._model = model

    def prepare_for_backward(self, _: Any) -> None:
        self._model.handle_in(self._model.stream).exchanges = True

"""Run a library's own training once plainly and twice with streamed models, and compare the results bit by bit.

1. A client is a function that takes the name of a strategy, and returns what it trained and predicted. It makes its
   data by itself and seeds nothing: each run starts from the same seed.
2. The plain run is made twice. One that differs from itself can say nothing about streaming.
3. A run has to have trained, with finite losses, and a streamed one has to have moved weights. Otherwise equal results
   would say nothing either.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from lightning import seed_everything

import sp_lightning
from sp_lightning.handle import Handle

Leaf = tuple[str, str, tuple[int, ...], bytes]
NAME, NARROW = "superpipeline", "superpipeline with window 1"


@dataclass(frozen=True)
class Client:
    """A library, and one function that uses it.

    Attributes:
        library: Its name on PyPI.
        package: The Lightning that it uses: "lightning", "pytorch-lightning" or "fabric".
        passed: Where its users write the strategy.
        needs: What else they have to write or know.
        run: Takes the name of a strategy, trains, and returns modules, predictions and other numbers.
    """

    library: str
    package: str
    passed: str
    needs: str
    run: Callable[[str], Any]

    @property
    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(self.library)
        return None


CLIENTS: dict[str, Client] = {}


def client(library: str, package: str, passed: str, needs: str = "nothing") -> Callable[[Callable[[str], Any]], Any]:
    """Register the function below as the client of a library."""

    def registered(run: Callable[[str], Any]) -> Callable[[str], Any]:
        CLIENTS[library] = Client(library, package, passed, needs, run)
        return run

    return registered


class Unequal(Exception):
    """Two runs differ, or say nothing about each other."""


@dataclass(frozen=True)
class Run:
    """What one run came to."""

    losses: list[Leaf]
    results: list[Leaf]
    nbytes_up: int


def compare(client: Client) -> str:
    """Run a client on all sides; return what was found equal, or raise `Unequal`."""
    plain, again = run(client, "auto"), run(client, "auto")
    check_equal(plain, again, "two plain runs differ, so nothing can be said about streamed ones")
    if not plain.losses:
        raise Unequal("the plain run trained nothing")
    for _, _, _, value in plain.losses:
        if not math.isfinite(numpy.frombuffer(value, "float64")[0]):
            raise Unequal("the plain run has losses that are not finite, which equal losses would not show")
    register_narrow(client.package)
    for strategy in (NAME, NARROW):
        streamed = run(client, strategy)
        if not streamed.nbytes_up:
            raise Unequal("the model was not streamed: the library dropped the strategy")
        check_equal(plain, streamed, "the streamed run differs from the plain one")
    return f"same bits: {len(plain.losses)} losses, {len(plain.results)} results"


def register_narrow(package: str) -> None:
    """Register a strategy with the smallest window, which moves each unit whenever it is used."""
    if package == "fabric":
        from lightning.fabric.strategies import STRATEGY_REGISTRY

        STRATEGY_REGISTRY.register(NARROW, sp_lightning.SuperpipelineFabricStrategy, override=True, window=1)
    elif package == "lightning":
        from lightning.pytorch.strategies import StrategyRegistry

        StrategyRegistry.register(NARROW, sp_lightning.SuperpipelineStrategy, override=True, window=1)
    else:
        import pytorch_lightning.strategies as theirs

        from sp_lightning.pytorch_lightning import SuperpipelineStrategy

        theirs.StrategyRegistry.register(NARROW, SuperpipelineStrategy, override=True, window=1)


def run(client: Client, strategy: str) -> Run:
    """Run a client once, in a folder of its own."""
    losses: list[torch.Tensor] = []
    handles: list[Handle] = []
    with tempfile.TemporaryDirectory() as folder, within(folder), recording(losses, handles):
        seed_everything(0, verbose=False)
        results = list(leaves(client.run(strategy)))
    scalars = [(f"loss {i}", "float64", (), loss.cpu().double().numpy().tobytes()) for i, loss in enumerate(losses)]
    return Run(scalars, results, sum(handle.stats()["bytes_up"] for handle in handles))


@contextlib.contextmanager
def within(folder: str) -> Iterator[None]:
    """Work in a folder, where libraries write logs and checkpoints; put it and the command line back."""
    before, arguments = os.getcwd(), sys.argv[:]
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.argv[:] = arguments


@contextlib.contextmanager
def recording(losses: list[torch.Tensor], handles: list[Handle]) -> Iterator[None]:
    """Note each tensor that ``backward`` is called on, and each handle. A callback would change what may overlap."""
    backward, attach = torch.Tensor.backward, Handle.__init__

    def noting(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss.detach().sum().clone())
        backward(loss, *args, **kwargs)

    def attaching(handle: Handle, *args: Any, **kwargs: Any) -> None:
        attach(handle, *args, **kwargs)
        handles.append(handle)

    torch.Tensor.backward, Handle.__init__ = noting, attaching  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward, Handle.__init__ = backward, attach  # type: ignore[method-assign]


def leaves(value: Any, path: str = "") -> Iterator[Leaf]:
    """The arrays of a nested value, each with its path, type, shape and bytes."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
        return
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().flatten().view(torch.uint8) if value.numel() else torch.empty(0)
        yield path, str(value.dtype), tuple(value.shape), raw.numpy().tobytes()
        return
    array = numpy.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(f"{path} is {type(value).__name__}, which has no bits to compare")
    yield path, str(array.dtype), array.shape, array.tobytes()


def check_equal(expected: Run, actual: Run, otherwise: str) -> None:
    """Raise `Unequal` at the first leaf that differs."""
    for theirs, ours in ((expected.losses, actual.losses), (expected.results, actual.results)):
        if [leaf[:3] for leaf in theirs] != [leaf[:3] for leaf in ours]:
            raise Unequal(f"{otherwise}: they have other results ({len(theirs)} and {len(ours)})")
        for one, other in zip(theirs, ours, strict=True):
            if one[3] != other[3]:
                raise Unequal(f"{otherwise}: {one[0]} {distance(one, other)}")


def distance(one: Leaf, other: Leaf) -> str:
    """By how much two leaves differ."""
    if one[1].removeprefix("torch.") not in ("float32", "float64"):
        return "differs"
    arrays = [numpy.frombuffer(leaf[3], leaf[1].removeprefix("torch.")) for leaf in (one, other)]
    return f"differs by {numpy.abs(arrays[0] - arrays[1]).max():.3g}, of at most {numpy.abs(arrays[0]).max():.3g}"

"""Runs the same code over a module twice, plainly and then streaming, and compares all that can be seen.

`check(make, run, device)` calls `run(module, device)`, a generator, for both: what it yields, and parameters, gradients
and buffers at its end, must be the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from stream_programs import streamed
from torch import Tensor, nn

import models
import parity

Run = Callable[[nn.Module, torch.device], Any]

blocks = models.stack_of(models.Block)  # a stem, four blocks, a head


def check(make: Callable[[], nn.Module], run: Run, device: torch.device, **options: Any) -> dict[str, Any]:
    """Compares a plain run with a streaming one, and returns the figures of the latter."""
    expected, _ = observe(make, run, device, None)
    actual, stats = observe(make, run, device, {"window": 1} | options)
    parity.compare(expected, actual)
    assert stats.get("bytes_up", 1) > 0
    return stats


def observe(
    make: Callable[[], nn.Module], run: Run, device: torch.device, options: dict[str, Any] | None
) -> tuple[parity.Record, dict[str, Any]]:
    """One of the two runs; it streams if there are options."""
    torch.manual_seed(0)
    module = make()
    if options is None:
        return observed(module.to(device), run, device, None)
    with streamed(module, device, **options) as handle:
        return observed(module, run, device, handle)


def observed(module: nn.Module, run: Run, device: torch.device, handle: Any) -> tuple[parity.Record, dict[str, Any]]:
    torch.manual_seed(1)
    entries: list[parity.Entry] = []

    for index, value in enumerate(run(module, device) or ()):
        entries += parity.seen(f"yield {index}", value)
    entries += parity.seen("parameter", dict(module.named_parameters()))
    entries += parity.seen("gradient", {name: p.grad for name, p in module.named_parameters()})
    stats = {}
    if handle is not None:
        stats = getattr(handle, "stats", dict)()
        handle.close()
        assert_plain(module)
    entries += parity.seen("buffer", dict(module.named_buffers()))
    return parity.Record(entries), stats


def assert_plain(module: nn.Module) -> None:
    """Nothing of ours is left in the module."""
    for name, parameter in module.named_parameters():
        is_ours = type(parameter).__module__.startswith("sp_lightning")  # libraries have kinds of their own
        assert not is_ours and parameter.device.type == "cpu", name
    for name, child in module.named_modules():
        for method in ("forward", "generate"):
            assert not type(vars(child).get(method)).__module__.startswith("sp_lightning"), (name, method)


def inputs(device: torch.device, count: int = 3) -> Iterator[Tensor]:
    """The batches of the zoo's ordinary nets, without labels."""
    for index in range(count):
        yield models.vectors(index)[0].to(device)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Which has state, and the same implementation wherever the parameters are."""
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9, foreach=False)


def squares(module: nn.Module, x: Tensor) -> Tensor:
    """A loss."""
    return module(x).square().mean()


def training(loss: Callable[[nn.Module, Tensor], Tensor] = squares, steps: int = 3) -> Run:
    """Trains with some batches."""

    def run(module: nn.Module, device: torch.device) -> Iterator[Any]:
        optimizer = sgd(module)
        for x in inputs(device, steps):
            optimizer.zero_grad()
            value = loss(module, x)
            value.backward()
            yield value, [p.grad for p in module.parameters()]
            optimizer.step()

    return run


def fit(make, strategy, device, ckpt_path=None, **options):
    """The module after a short fit, plain if there is no strategy; with the list `losses` for it to fill."""
    torch.manual_seed(0)
    module = make()
    module.losses = []
    batches = torch.utils.data.DataLoader([models.vectors(i) for i in range(4)], batch_size=None)
    strategy = strategy or parity.plain_strategy(device.type)
    trainer = parity.make_trainer(strategy, device.type, **{"max_steps": 4, **options})
    trainer.fit(module, batches, ckpt_path=ckpt_path)
    return module

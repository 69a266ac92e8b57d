"""Models whose frozen weights lie in files, as loaders leave them: views of private mappings, at odd offsets.

`freeze` freezes most of a net's parameters, `put` moves the bytes of the frozen ones into a file and maps them. A case
for both, `frozen` and `filed`, makes the same net with its weights in memory and in files.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import models

HEADER = 264  # bytes before the first weight, as in a file of safetensors: no multiple of a block, nor of 512


def freeze(net: nn.Module, trained: int = 3) -> nn.Module:
    """Leaves gradients to every third parameter, and to the last: units have both kinds of weights."""
    parameters = list(net.parameters())
    for number, parameter in enumerate(parameters):
        parameter.requires_grad_(number % trained == trained - 1 or number == len(parameters) - 1)
    return net


def put(net: nn.Module, folder: str | None = None, files: int = 2) -> list[str]:
    """Moves frozen parameters into files: neighbours in turns, so that units and pages are shared."""
    found = [p for p in net.parameters() if not p.requires_grad and p.numel() and is_dense(p.data)]
    folder = folder or tempfile.mkdtemp(dir=os.getcwd())
    paths = []
    for part in range(files):
        if here := found[part * len(found) // files : (part + 1) * len(found) // files]:
            paths.append(write(os.path.join(folder, f"weights-{part}"), [p.data for p in here]))
            for parameter, mapped in zip(here, mapped_views(paths[-1], [p.data for p in here]), strict=True):
                parameter.data = mapped
    return paths


def is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor)) and not tensor.is_conj()


def offsets(tensors: list[Tensor]) -> list[int]:
    """One after the other, each at a multiple of its element's size."""
    found, end = [], HEADER
    for tensor in tensors:
        found.append(-(-end // tensor.itemsize) * tensor.itemsize)
        end = found[-1] + tensor.nbytes
    return found


def raw(tensor: Tensor) -> bytes:
    """The bytes of a dense tensor in the order of memory."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,)
    )
    return flat.view(torch.uint8).numpy().tobytes()


def write(path: str, tensors: list[Tensor]) -> str:
    with open(path, "wb") as file:
        for tensor, offset in zip(tensors, offsets(tensors), strict=True):
            file.seek(offset)
            file.write(raw(tensor))
    return path


def mapped_views(path: str, like: list[Tensor]) -> list[Tensor]:
    """Tensors over a private mapping of a file, each with a storage of its own, as safetensors makes them."""
    storage = torch.UntypedStorage.from_file(path, False, os.path.getsize(path))
    views = []
    for tensor, offset in zip(like, offsets(like), strict=True):
        part = storage[offset : offset + tensor.nbytes]
        views.append(torch.empty(0, dtype=tensor.dtype).set_(part, 0, tensor.shape, tensor.stride()))
    return views


def frozen(case: models.Case, dtype: torch.dtype | None = None) -> models.Case:
    return made_by(case, lambda: freeze(case.make().to(dtype)))


def filed(case: models.Case, dtype: torch.dtype | None = None) -> models.Case:
    def make() -> nn.Module:
        net = freeze(case.make().to(dtype))
        put(net)
        return net

    return made_by(case, make)


def made_by(case: models.Case, make: Callable[[], Any]) -> models.Case:
    return dataclasses.replace(case, make=make)

"""Register "superpipeline" with Lightning, or with ``pytorch_lightning``, when that is imported.

Importing this module imports neither: a command that needs no Lightning does not wait for it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "superpipeline"
REGISTRIES = {  # by the package that is imported: the modules with its registries, and the package of our strategies
    "lightning": ("lightning.pytorch.strategies", "lightning.fabric.strategies", "sp_lightning.lightning"),
    "pytorch_lightning": (
        "pytorch_lightning.strategies",
        "lightning_fabric.strategies",
        "sp_lightning.pytorch_lightning",
    ),
}


def register(package: str) -> None:
    """Import a package, and register "superpipeline" with its Trainer and Fabric. A second call does nothing."""
    trainer, fabric, ours = REGISTRIES[package]
    for module, registry, made in (
        (trainer, "StrategyRegistry", (f"{ours}.strategy", "SuperpipelineStrategy")),
        (fabric, "STRATEGY_REGISTRY", (f"{ours}.fabric", "SuperpipelineFabricStrategy")),
    ):
        strategies = getattr(importlib.import_module(module), registry)
        if NAME not in strategies:
            strategies.register(NAME, functools.partial(_make, *made), description="Streams a model's weights")


def _make(module: str, name: str, **options: Any) -> Any:
    """Import a module, and create the strategy of this name with the options."""
    return getattr(importlib.import_module(module), name)(**options)


def register_when_imported() -> None:
    """Register with each package of Lightning: now if it is imported already, else after its import."""
    for package in REGISTRIES:
        if package in sys.modules:
            register(package)
    if not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport())


class AfterImport(MetaPathFinder):
    """An import finder: it leaves finding to the others, and registers with a package once its code has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a package with registries, or None for all other modules."""
        if name not in REGISTRIES:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(_execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run a package's code, then register the strategies with it."""
    execute(module)
    register(module.__name__)

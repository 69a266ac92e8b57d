"""Train models that do not fit on the device: ``Trainer(strategy="superpipeline")``.

Importing this package imports neither torch nor Lightning. The strategies are registered with Lightning, and with
``pytorch_lightning``, as soon as that is imported; public names are imported when they are first used.
"""

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from .lightning.registration import register_when_imported

if TYPE_CHECKING:
    from .handle import Handle, stream
    from .lightning.callback import SuperpipelineCallback
    from .lightning.fabric import SuperpipelineFabricStrategy
    from .lightning.strategy import SuperpipelineStrategy
    from .plan import Plan, plan
    from .ranks.sums import tree_hook

__all__ = [
    "Handle",
    "Plan",
    "SuperpipelineCallback",
    "SuperpipelineFabricStrategy",
    "SuperpipelineStrategy",
    "plan",
    "stream",
    "tree_hook",
]
_PLACES = {
    "Handle": "handle",
    "Plan": "plan",
    "SuperpipelineCallback": "lightning.callback",
    "SuperpipelineFabricStrategy": "lightning.fabric",
    "SuperpipelineStrategy": "lightning.strategy",
    "plan": "plan",
    "stream": "handle",
    "tree_hook": "ranks.sums",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of this package, when it is first used."""
    if name in _PLACES:
        found = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
        globals()[name] = found
        return found
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(types.ModuleType):
    """The type of this package: `plan` and `stream` are functions here, although subpackages have these names too."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _PLACES and isinstance(value, types.ModuleType):
            return  # an import would put the subpackage of this name over the function
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        """Pickle this package by name: functions that Ray sends to its workers may refer to it."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
register_when_imported()

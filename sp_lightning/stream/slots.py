"""The places in which modules store each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Slot:
    """One place in which a module stores a parameter: `holder[key]`, or `holder[key][inside]` in a list, tuple or dict.

    The container is read each time: the forward of an LSTM makes its list anew when it finds other weights.
    """

    holder: dict[Any, Any]
    key: Any
    inside: Any = None

    def get(self) -> Any:
        """Return what the slot holds; None if the user's code removed the slot."""
        try:
            found = self.holder[self.key]
            return found if self.inside is None else found[self.inside]
        except (LookupError, TypeError):  # the user's code removed it
            return None

    def set(self, value: Any) -> None:
        """Put a value into the slot; a tuple is replaced by a new one."""
        found = self.holder[self.key]
        if self.inside is None:
            self.holder[self.key] = value
        elif isinstance(found, tuple):
            items = [*found[: self.inside], value, *found[self.inside + 1 :]]
            self.holder[self.key] = found._make(items) if hasattr(found, "_make") else type(found)(items)
        else:
            found[self.inside] = value


def slots(root: nn.Module) -> dict[nn.Parameter, list[Slot]]:
    """Find every slot of each of the tree's parameters, in registration order; costs one scan of attributes.

    Registered slots come first: several for tied weights. Then follow parameters that modules store beside the
    registry, as an attribute or in a list, tuple or dict that is one (LSTM and GRU read `_flat_weights`, not their
    parameters).
    """
    modules = list(root.modules())
    found: dict[nn.Parameter, list[Slot]] = {}
    for module in modules:
        for key, param in module._parameters.items():
            if param is not None:
                found.setdefault(param, []).append(Slot(module._parameters, key))
    scanned: set[int] = set()
    for module in modules:
        for slot, param in _attribute_slots(module, scanned):
            if param in found:
                found[param].append(slot)
    return found


def _attribute_slots(module: nn.Module, scanned: set[int]) -> Iterator[tuple[Slot, nn.Parameter]]:
    """Yield the slots of parameters in a module's attributes: stored directly, or in a list, tuple or dict."""
    attributes = vars(module)
    for key, value in attributes.items():
        if isinstance(value, (dict, list)):
            # A list that two modules share is scanned once. Most are registries of hooks, which are empty.
            if value and value is not module._parameters and id(value) not in scanned:
                scanned.add(id(value))
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((Slot(attributes, key, inner), item) for inner, item in items if _is_parameter(item))
        elif isinstance(value, tuple):
            yield from ((Slot(attributes, key, i), item) for i, item in enumerate(value) if _is_parameter(item))
        elif _is_parameter(value):
            yield Slot(attributes, key), value


def _is_parameter(item: object) -> TypeGuard[nn.Parameter]:
    return isinstance(item, Tensor) and isinstance(item, nn.Parameter)  # the parameter check takes ten times as long

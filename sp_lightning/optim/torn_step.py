"""Torn steps: weights and optimizer state of no step, until state is loaded.

- A step is *torn* if an error ended it when some parameters were stepped, or were being stepped, and others were not.
  An error before the first or after the last of them tears nothing. One in torch's own loop is left alone: it leaves a
  plain run's weights half stepped, too; but not where several ranks step a part each.
- The optimizer of a torn step is marked, and so is each of its parameters that trains. What is marked is neither
  stepped nor saved as a checkpoint. It can be read: code that looks at weights after an error finds what is there.
- ``load_state_dict`` removes marks: that of an optimizer into which state is loaded, and those of the parameters for
  which a module loads values. Another optimizer of the same parameters has no mark, and steps once they have none.
- Marks belong to the objects, not to a run: they stay when streaming ends, and copies of the objects have none.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..compat.streaming import without_dispatch
from ..errors import TornStepError
from ..stream.lazy import stored_version

log = logging.getLogger(__name__)

GO_ON = (
    "load a checkpoint into the module and into its optimizer to go on: Trainer.fit(ckpt_path=...), Fabric.load, or "
    "load_state_dict() of both"
)
_torn: list[TornStep] = []
_streamed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules whose loads of state are noticed


@dataclass(eq=False)
class TornStep:
    """A step that was torn, with the optimizer and the parameters that it left half done."""

    why: str
    optimizer: weakref.ref[Optimizer] | None
    parameters: dict[int, weakref.ref[Tensor]]  # by their ids
    loading: dict[int, dict[int, int]] = field(default_factory=dict)  # versions before, by ids of module and parameter
    hooks: list[RemovableHandle] = field(default_factory=list)

    def marks(self, one: Any) -> bool:
        """Whether an optimizer or a parameter is marked."""
        mark = self.optimizer if isinstance(one, Optimizer) else self.parameters.get(id(one))
        return mark is not None and mark() is one

    @property
    def is_over(self) -> bool:
        """Whether nothing is marked any more."""
        return all(mark is None or mark() is None for mark in (self.optimizer, *self.parameters.values()))

    def optimizer_loaded(self, optimizer: Optimizer) -> None:
        """Remove the optimizer's mark."""
        self.optimizer = None


def notice_loads(module: nn.Module) -> None:
    """Have loads of a module's state, or of its submodules', remove the marks of their parameters from now on."""
    _streamed.add(module)


def tear(optimizer: Optimizer, stepped: int | str, error: BaseException) -> None:
    """Mark an optimizer and its parameters as torn: an error ended a step when `stepped` of them were done."""
    if _why([optimizer]):
        return  # the same error was met before
    params = [param for group in optimizer.param_groups for param in group["params"]]
    log.error(
        "superpipeline: the step failed when the optimizer had already stepped %s of %d parameters; "
        "optimizer_overlap=False keeps a step that fails in backward from changing any parameter. Weights and "
        "optimizer state are those of no step: they are neither stepped nor saved in a checkpoint until one is loaded",
        stepped,
        len(params),
    )
    why = (
        f"{type(optimizer).__name__} had stepped {stepped} of {len(params)} parameters when a {type(error).__name__} "
        "ended its step, so weights and optimizer state are those of no step"
    )
    trained = {id(param): weakref.ref(param) for param in params if param.requires_grad}
    torn = TornStep(why, weakref.ref(optimizer), trained)
    torn.hooks = [
        optimizer.register_step_pre_hook(_before_step),
        optimizer.register_load_state_dict_post_hook(torn.optimizer_loaded),
    ]
    for module in {module for root in _streamed for module in root.modules()}:
        if any(map(torn.marks, module._parameters.values())):
            torn.hooks += [
                module.register_load_state_dict_pre_hook(_before_load),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_post_hook(_after_load),  # type: ignore[no-untyped-call]
            ]
    _torn.append(torn)


def check_step(optimizer: Optimizer) -> None:
    """Raise TornStepError if an optimizer, or one of its parameters, is marked."""
    if _torn:
        _forget()
        _before_step(optimizer)


def why_not_saved(parts: Iterable[nn.Module | Optimizer]) -> str | None:
    """Say why no checkpoint of these modules and optimizers may be saved; None if one may."""
    if not _torn:
        return None
    _forget()
    ones: list[Any] = []
    for part in parts:
        ones += part.parameters() if isinstance(part, nn.Module) else [part]
    why = _why(ones)
    return why and f"{why}, and no checkpoint has them; {GO_ON}"


def _why(ones: Iterable[Any]) -> str | None:
    """Say why one of these is marked; None if none is."""
    return next((torn.why for one in ones for torn in _torn if torn.marks(one)), None)


def _forget() -> None:
    """Remove the hooks on steps where nothing is marked any more."""
    for torn in [torn for torn in _torn if torn.is_over]:
        _torn.remove(torn)
        for hook in torn.hooks:
            hook.remove()


# ---- hooks: functions, as modules are copied and pickled with them


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    why = _why([optimizer, *(param for group in optimizer.param_groups for param in group["params"])])
    if why is not None:
        raise TornStepError(f"{why}, and nothing steps them; {GO_ON}")


def _before_load(module: nn.Module, *_: Any) -> None:
    for torn in _torn:
        own = [param for param in module._parameters.values() if param is not None and torn.marks(param)]
        torn.loading[id(module)] = _versions(own)


def _after_load(module: nn.Module, *_: Any) -> None:
    """Remove the marks of parameters that were written, or replaced, while their module loaded its state."""
    own = _versions(param for param in module._parameters.values() if param is not None)
    for torn in _torn:
        for number, version in torn.loading.pop(id(module), {}).items():
            if own.get(number) != version:
                torn.parameters.pop(number, None)


def _versions(params: Iterable[nn.Parameter]) -> dict[int, int]:
    with without_dispatch():
        return {id(param): stored_version(param) for param in params}

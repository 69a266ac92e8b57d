"""Half-applied steps: some weights were stepped, and others were not, or not yet.

- An error that ends a step after it changed a weight leaves weights and optimizer state of no step. So does an
  exception between a backward, beside which weights were stepped, and the user's call of the step.
- Nothing steps or saves the optimizer then, nor the weights that train with it, until state was loaded into both: by
  the optimizer's `load_state_dict`, and by writing each of the weights. They can be read. Another optimizer of the same
  weights steps once these are loaded.
- This belongs to the objects, not to a stream: it holds when streaming has ended, and copies of the objects are free.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, optim

from ..compat.torch import without_dispatch
from ..errors import ExactnessError, HalfAppliedStepError
from ..stream.host_gradient import GradientBytes
from ..stream.lazy import grad_of, stored_version
from ..stream.leaf import Weight, stepped_already

log = logging.getLogger(__name__)

NO_STEP = "weights and optimizer state are those of no step, and nothing steps or saves them"
GO_ON = (
    "Load the last checkpoint into both to go on: Trainer.fit(ckpt_path=...), Fabric.load, or load_state_dict() of the"
    " module and of its optimizer"
)
_left: list[HalfApplied] = []  # half-applied steps whose weights or optimizer nothing has loaded since


@dataclass(eq=False)
class HalfApplied:
    """A half-applied step: its reason, and the optimizer and weights that nothing has loaded since."""

    why: str
    optimizer: weakref.ref[optim.Optimizer] | None  # None: state was loaded into the optimizer
    versions: dict[int, tuple[weakref.ref[Tensor], int]]  # the weights' versions as the step left them, by id

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer or a weight still exists with what the half-applied step left in it."""
        kept = [weight() for weight, _ in self.versions.values()]
        return (self.optimizer is not None and self.optimizer() is not None) or any(map(self.has_left, kept))

    def has_left(self, one: Any) -> bool:
        """Whether this step half-applied an optimizer or a weight, and no state was loaded into it since."""
        if isinstance(one, optim.Optimizer):
            return self.optimizer is not None and self.optimizer() is one
        weight, version = self.versions.get(id(one), (None, 0))
        return one is not None and weight is not None and weight() is one and _version(one) == version


def mark(optimizer: optim.Optimizer, why: str) -> None:
    """Log that an optimizer's step was half applied, and refuse to step or save it and its weights from here on."""
    if _why([optimizer]):
        return  # an earlier error has marked it
    log.error("superpipeline: %s: %s", why, NO_STEP)
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    versions = {id(param): (weakref.ref(param), _version(param)) for param in params}
    _left.append(HalfApplied(why, weakref.ref(optimizer), versions))


def note_loaded(optimizer: optim.Optimizer) -> None:
    """Note that state was loaded into an optimizer: it may step once its weights are loaded as well."""
    for step in list(_left):  # a copy: the steps' thread may add to the list
        if step.has_left(optimizer):
            step.optimizer = None
        if not step.is_alive:
            _left.remove(step)


def why_refused(parts: Iterable[nn.Module | optim.Optimizer]) -> str | None:
    """Say why modules and optimizers may be neither stepped nor saved; None if they may be."""
    ones: list[Any] = []
    for part in parts if _left else ():
        ones += part.parameters() if isinstance(part, nn.Module) else [part]
    why = _why(ones)
    return why and f"{why}: {NO_STEP}. {GO_ON}"


def check_step(optimizer: optim.Optimizer, *_: Any) -> None:
    """Raise if a half-applied step left an optimizer or its weights. Also a hook of steps after the stream's end."""
    weights = (param for group in optimizer.param_groups for param in group["params"])
    if _left and (why := _why([optimizer, *weights])):
        raise HalfAppliedStepError(f"{why}: {NO_STEP}. {GO_ON}")


def refuse_later_steps(optimizer: optim.Optimizer) -> None:
    """Make a half-applied optimizer, whose stream ends, refuse to step until state is loaded."""
    if _why([optimizer]):
        optimizer.register_step_pre_hook(check_step)
        optimizer.register_load_state_dict_post_hook(note_loaded)


def _why(ones: Iterable[Any]) -> str | None:
    """Return the reason of a half-applied step that left any of these optimizers or weights; None if there is none."""
    return next((step.why for one in ones for step in _left if step.has_left(one)), None)


def _version(weight: Any) -> Any:
    """Return a weight's version, without waiting for steps."""
    with without_dispatch():
        return stored_version(weight)


@dataclass
class Outcome:
    """The result so far of one optimizer step over several units. After an error, units not yet begun are skipped."""

    is_early: bool = False  # beside a backward: any error leaves a half-applied step, as weights are marked as stepped
    has_changed: bool = False  # whether a weight was changed
    error: BaseException | None = None

    def failed(self, optimizer: optim.Optimizer, where: str, error: BaseException) -> None:
        """Note the error of the unit named ``where``; mark the step as half applied if it changed any weight."""
        self.error = self.error or error
        if self.has_changed or self.is_early:
            mark(optimizer, f"an optimizer step ended half-way, at {where}, by {type(error).__name__}: {error}")


class EarlySteps:
    """The weights that were stepped beside a backward, until the user calls the optimizer's step."""

    def __init__(self) -> None:
        self.outcome = Outcome(is_early=True)
        self.stepped: dict[Weight, GradientBytes] = {}  # with the gradients that stepped them
        self._stepper: optim.Optimizer | None = None
        self._options: Any = None  # the optimizer's options at the first of these steps
        self._params: list[list[int]] = []  # ids of each group's parameters at the first of these steps

    def mark(self, optimizer: optim.Optimizer, whose: list[Weight]) -> None:
        """Note weights that the optimizer steps beside backward. From here on, an access to their gradients raises."""
        if self.stepped:
            self._check_options(optimizer)
        else:
            self._params, self._options = _params(optimizer), _numbers(optimizer)
        self._stepper = optimizer
        for weight in whose:
            content = self.stepped[weight] = grad_of(weight.host).content
            content.is_stepped_early = weight.is_stepped_early = True

    def weights_left(self, optimizer: optim.Optimizer, whose: list[Weight]) -> list[Weight]:
        """Return those of the weights ``whose`` that were not stepped in backward, for the user's call of step.

        Raises if the optimizer, its options or the gradients changed since the steps beside backward.
        """
        if optimizer is self._stepper:
            self._check_same(optimizer)
            return [weight for weight in whose if not weight.is_stepped_early]
        for weight in whose:
            if weight.is_stepped_early:
                raise stepped_already(weight.name)
        return whose

    def _check_same(self, optimizer: optim.Optimizer) -> None:
        """Raise if weights were stepped with other options or groups, or with gradients that are gone."""
        for weight, content in self.stepped.items():
            if getattr(grad_of(weight.host), "content", None) is not content:
                self.check()
                break
        self._check_options(optimizer)
        if self.stepped and self._params != _params(optimizer):
            raise _changed("groups")

    def _check_options(self, optimizer: optim.Optimizer) -> None:
        """Raise if the optimizer's options changed since the first step beside backward."""
        if self._options != _numbers(optimizer):
            raise _changed("options")

    def end(self, optimizer: optim.Optimizer) -> None:
        """Forget the steps beside backward, now that the user's call of this optimizer's step is complete."""
        if optimizer is self._stepper:
            self._forget()

    def _forget(self) -> None:
        """Clear the marks of the weights that were stepped beside backward, and of their gradients."""
        for weight, content in self.stepped.items():
            content.is_stepped_early = weight.is_stepped_early = False
        self.stepped.clear()
        self._stepper = None

    def check(self) -> None:
        """Raise if weights were stepped beside a backward and the user has not called the optimizer's step."""
        if self.stepped:
            raise HalfAppliedStepError(
                "weights were stepped beside a backward, and optimizer.step() has not come with their gradients: "
                f"{NO_STEP}. {GO_ON}. optimizer_overlap=False steps nothing beside backward"
            )

    def note_exception(self, error: BaseException) -> None:
        """Mark the step as half applied if an exception came between steps beside backward and the user's call."""
        if self.stepped and self._stepper is not None:
            total = sum(map(len, self._params))
            mark(
                self._stepper,
                f"{type(error).__name__} came between a backward, beside which the optimizer had already stepped"
                f" {len(self.stepped)} of {total} parameters, and optimizer.step(); optimizer_overlap=False keeps such"
                " an exception from changing any parameter",
            )
            self._forget()


def _numbers(optimizer: optim.Optimizer) -> Any:
    """List the options of each group, with tensors as numbers, to compare them later."""
    return [
        [value.tolist() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"]
        for group in optimizer.param_groups
    ]


def _params(optimizer: optim.Optimizer) -> list[list[int]]:
    """List the ids of each group's parameters."""
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _changed(what: str) -> ExactnessError:
    """Make the error of an optimizer that was changed between steps beside backward and the user's call of step."""
    return ExactnessError(
        f"{what} of the optimizer changed after weights were stepped beside backward with the {what} before: set"
        " optimizer_overlap=False"
    )

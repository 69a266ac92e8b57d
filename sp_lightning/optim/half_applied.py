"""Half-applied steps: some weights were stepped, and others were not, or not yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, optim

from ..errors import ExactnessError, TornStepError
from ..stream.gradients import GradientBytes
from ..stream.lazy import grad_of
from ..stream.leaf import Weight, stepped_already


@dataclass
class Outcome:
    """The outcome of a step of several units, of which an error ends those that have not begun."""

    versions: dict[Weight, int] = field(default_factory=dict)  # of the weights that it changed, after that
    error: BaseException | None = None
    where: str = ""  # the unit of the error
    is_early: bool = False  # beside a backward: an error leaves the step half applied, as others are marked as stepped
    has_state: bool = False  # whether state was loaded since

    def note(self, whose: list[Weight]) -> None:
        """Note that weights were changed."""
        self.versions.update({weight: weight.value._version for weight in whose})

    @property
    def is_replaced(self) -> bool:
        """Whether state was loaded, and all weights that were changed have been written since."""
        return self.has_state and all(weight.value._version != version for weight, version in self.versions.items())

    def check(self) -> None:
        """Raise if an error ended the step, and weights and state were not loaded since."""
        if self.error is not None and not self.is_replaced:
            raise TornStepError(
                f"an optimizer step ended half-way, at {self.where}, by {type(self.error).__name__}: {self.error}."
                " Weights and optimizer state are those of no step: load the last checkpoint into both"
            ) from self.error


class EarlySteps:
    """The weights that were stepped beside a backward, until the user calls the step."""

    def __init__(self) -> None:
        self.outcome = Outcome(is_early=True)
        self.stepped: dict[Weight, GradientBytes] = {}  # with the gradients that were taken
        self._stepper: optim.Optimizer | None = None
        self._options: Any = None  # with which they were stepped
        self._params: list[list[int]] = []  # of the optimizer's groups, by their ids, as the first was stepped

    def mark(self, optimizer: optim.Optimizer, whose: list[Weight]) -> None:
        """Note weights that the optimizer steps from here on. A touch of their gradients is an error."""
        if self.stepped:
            self._check_options(optimizer)
        else:
            self._params, self._options = _params(optimizer), _numbers(optimizer)
        self._stepper = optimizer
        for weight in whose:
            content = self.stepped[weight] = grad_of(weight.host).content
            content.is_stepped_early = weight.is_half_applied = True

    def left_of(self, optimizer: optim.Optimizer, whose: list[Weight]) -> list[Weight]:
        """Return the weights that the user's call of the step is to step; raise if it is not that of those stepped."""
        if optimizer is self._stepper:
            self._check_same(optimizer)
            return [weight for weight in whose if not weight.is_half_applied]
        for weight in whose:
            if weight.is_half_applied:
                raise stepped_already(weight.name)
        return whose

    def _check_same(self, optimizer: optim.Optimizer) -> None:
        """Raise if weights were stepped with other options, or with gradients that are gone."""
        for weight, content in self.stepped.items():
            if getattr(grad_of(weight.host), "content", None) is not content:
                self.check()
                break
        self._check_options(optimizer)
        if self.stepped and self._params != _params(optimizer):
            raise _changed("groups")

    def _check_options(self, optimizer: optim.Optimizer) -> None:
        if self._options != _numbers(optimizer):
            raise _changed("options")

    def end(self, optimizer: optim.Optimizer) -> None:
        """Note that the user's call of this optimizer's step has stepped the others."""
        if optimizer is self._stepper:
            self._forget()

    def _forget(self) -> None:
        for weight, content in self.stepped.items():
            content.is_stepped_early = weight.is_half_applied = False
        self.stepped.clear()
        self._stepper = None

    def check(self) -> None:
        """Raise if weights were stepped whose step the user has not called, unless weights and state were loaded."""
        if self.stepped and self.outcome.is_replaced:
            self._forget()
        if self.stepped:
            raise TornStepError(
                "an exception came between a backward, beside which weights were stepped, and optimizer.step(): weights"
                " and optimizer state are those of no step. Load the last checkpoint into both, or set"
                " optimizer_overlap=False"
            )


def _numbers(optimizer: optim.Optimizer) -> Any:
    """List the options whose change can be seen."""
    return [
        [value.tolist() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"]
        for group in optimizer.param_groups
    ]


def _params(optimizer: optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _changed(what: str) -> ExactnessError:
    return ExactnessError(
        f"{what} of the optimizer changed after weights were stepped beside backward with the {what} before: set"
        " optimizer_overlap=False"
    )

"""A model to plan for: what its units cost, and what it needs on the device and on the host.

1. A module is traced (traced_model.py). A workload's numbers are listed (listed_model.py).
2. The loss of a language model of transformers may be in chunks, if the dry run saw that it is nothing else than the
   cross entropy of what its head, one linear layer, makes of what its base model returns.
3. With a host budget, frozen weights stay in files as in a run (disk/placement.py). Of a module that has its weights,
   those that are in files can; of any other, all frozen ones, which are taken to be in files in the type planned. With
   a disk the optimizer's state goes there as in a run, where it is taken to be AdamW's until it is there, and then
   weights. Of those that may come to travel in autocast's type, the dry run finds out which do. Offloaded activations
   have what is left of the budget; what exceeds that is on the disk (disk/activation_blocks.py).
4. Of a model that answers nothing is trained. A step is the pass in the middle of an answer: a token for each row.
5. A step may begin with answers, and with what other models say of them: passes that train nothing. Each takes its
   time as often as it takes place, and the device's peak is that of all of them and the step.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.tensors import without_dispatch_modes, without_function_modes
from ..core.machine import Machine
from ..core.remedies import STATE_NBYTES
from ..core.simulation import SimulatedVisit
from ..core.unit_numbers import STATES, HostBytes, HostSharing, UnitHostBytes, UnitNumbers, state_nbytes
from ..disk import state_ring
from ..disk.placement import Budgeted
from ..errors import OptionError
from ..optim.pieces import ELEMENTWISE
from ..options import Options
from ..tracing.answers import Answers
from ..tracing.step_trace import StepTrace

HALF = {"bf16": torch.bfloat16, "16": torch.float16}
CUT = frozenset(kind.__name__.lower() for kind in ELEMENTWISE)  # optimizers of which each rank steps a part


@dataclass(frozen=True)
class Requirements:
    """The needs of a step: what does not depend on window and transfer, and the device's peak, which does."""

    costs: list[UnitNumbers]  # in the order of their first visits, resident ones last
    works: list[SimulatedVisit]
    peak: Callable[[int, int], dict[str, int]]  # of a window and a transfer: the device's bytes, by term
    sizes: Sequence[UnitNumbers]  # of all units, as a run knows them when it begins
    trace: StepTrace | None = None  # None for a workload
    weights_on_disk: int = 0  # bytes, in files or in the scratch file
    reading: Requirements | None = None  # of the pass that reads the prompts, if the model answers (Rule 4)
    before: tuple[tuple[Requirements, float], ...] = ()  # of passes before the step, with how often each is (Rule 5)
    steps_nbytes: int = 0  # on the device, of the optimizer's steps there
    whole_nbytes: int = 0  # more of them after backward, of weights that are stepped whole

    @property
    def on_disk(self) -> int:
        """Bytes of state, of weights that train, their wire copies and gradients on a disk: written once in a step."""
        return sum(cost.state_written_nbytes for cost in self.costs)

    @property
    def gradients_on_disk(self) -> int:
        """Bytes of gradients on a disk: read and written also where they are only added to."""
        return sum(cost.gradients_on_disk for cost in self.costs)

    @property
    def activations_on_disk(self) -> int:
        """Bytes of activations that each batch writes to a disk, and reads."""
        return sum(work.written_nbytes for work in self.works)

    @property
    def streamed(self) -> list[UnitNumbers]:
        return [cost for cost in self.costs if not cost.resident]


class PlannedModel(ABC):
    """A model to plan for."""

    name: str
    rows: int
    counted = "rows"  # what `rows` counts
    optimizer = ""  # class name of the module's own first optimizer, once it was made
    notes: list[str]

    @abstractmethod
    def needs(self, options: Options, machine: Machine) -> Requirements:
        """Return the requirements of a step with the given batch."""

    @abstractmethod
    def with_rows(self, rows: int, options: Options, machine: Machine) -> Requirements | None:
        """Return the requirements with another number of rows; None if they are unknown."""

    @abstractmethod
    def host(self, options: Options, needs: Requirements) -> HostBytes:
        """Return the host memory that a run takes."""

    def states(self) -> float:
        """Return how many tensors of a parameter's size the optimizer stores for it."""
        return STATES["AdamW"]

    def movable_states(self, sharing: HostSharing, optimizer: Any) -> float:
        """Return how many of them a disk may take: none of an optimizer that each of several ranks steps as a whole."""
        is_whole = sharing.several and not is_cut(name_of_optimizer(optimizer) or self.optimizer)
        return 0.0 if is_whole else self.states()

    def in_half(self) -> PlannedModel | None:
        """Return the same model computed in half precision; None unless it is a module that computes in FP32."""
        return None

    @property
    def logits_nbytes(self) -> int:
        """Lower bound of the bytes of logits that a loss in chunks would not have; 0 if there can be none (Rule 2)."""
        return 0

    def in_chunks(self) -> PlannedModel | None:
        """Return the same model with its loss in chunks; None if there can be none."""
        return None

    @property
    def answers(self) -> Answers | None:
        """Tokens that the model generates, if it is not trained (Rule 4)."""
        return None


def half_of(precision: str) -> torch.dtype | None:
    """Return the half-precision type in which such a run computes, if it does."""
    return HALF.get(precision.split("-")[0])


def check_master_weights(options: Options, precision: str) -> None:
    """Raise OptionError if master weights are asked for without a precision that has them."""
    if options.master_weights and (half_of(precision) is None or precision.endswith("mixed")):
        allowed = "'bf16-true' or '16-true' with master_weights=True"
        raise OptionError(argument="precision", found=precision, allowed=allowed)


QUANTIZED = ("AdamW8bit",)  # optimizers of bitsandbytes: a name does not need it installed


def with_moved(
    costs: Sequence[UnitNumbers],
    names: Sequence[str],
    placed: Budgeted,
    trained: Sequence[int],
    stepped: Mapping[int, int],
    wires: Mapping[int, int],
    gradients: Iterable[int],
    state: Sequence[int],
) -> list[UnitNumbers]:
    """Return the costs with the bytes that a step of each unit reads from the disk and writes there (Rule 3).

    Args:
        costs: Of units, by their names.
        names: Of all units, as `placed` counts them.
        placed: What is where.
        trained: Bytes of each unit's weights that train.
        stepped: Bytes of those that are on the disk, by unit.
        wires: Bytes of wire copies that are there, by unit: they are written only.
        gradients: The units whose gradients are there: they are written when they arrive, and read by the step.
        state: Bytes of each unit's state that can be there.
    """
    moved = dict.fromkeys(names, 0)
    for index in placed.spilled:
        moved[names[index]] += state[index]
    for index, nbytes in stepped.items():
        moved[names[index]] += nbytes
    made = {names[index]: nbytes for index, nbytes in wires.items()}
    came = {names[index]: trained[index] for index in gradients}
    of_each = ((c, moved.get(c.name, 0), made.get(c.name, 0), came.get(c.name, 0)) for c in costs)
    return [
        replace(
            cost,
            state_read_nbytes=nbytes + gradient,
            state_written_nbytes=nbytes + wire + gradient,
            gradients_on_disk=gradient,
        )
        for cost, nbytes, wire, gradient in of_each
    ]


def with_activations_on_disk(works: Sequence[SimulatedVisit], nbytes: int) -> list[SimulatedVisit]:
    """Return the visits with these bytes of activations on the disk: the first that are saved, which return last."""

    def first(moved: Sequence[int]) -> list[int]:
        passed = [0, *itertools.accumulate(moved)]
        return [min(count, max(0, nbytes - before)) for count, before in zip(moved, passed, strict=False)]

    written = first([work.stowed_nbytes for work in works])
    read = reversed(first([work.fetched_nbytes for work in reversed(works)]))
    return [replace(work, written_nbytes=w, read_nbytes=r) for work, w, r in zip(works, written, read, strict=True)]


def name_of_optimizer(optimizer: Any) -> str:
    """Name the class of what is given as the optimizer of a plan; empty where only the module knows it."""
    if isinstance(optimizer, str):
        return next((name for name in STATE_NBYTES if name.lower() == optimizer.lower()), optimizer)
    if optimizer is None:
        return ""
    kind: Any = getattr(optimizer, "func", optimizer)
    if not isinstance(kind, type):  # a function, which makes one of some class
        try:
            kind = type(_made(optimizer))
        except Exception:  # what is wrong with it `states_of` says
            return ""
    return str(kind.__name__)


def is_cut(optimizer: str) -> bool:
    """Whether each rank steps its parts with an optimizer of this name, or one that is not known."""
    return not optimizer or optimizer.lower() in CUT


def whole_states(states: float) -> int:
    """Count the state tensors of a parameter's shape, which can be on disk; an optimizer's others stay in memory."""
    return int(states + 1e-3)


def without_disk(host: HostBytes, placed: Budgeted, units: Sequence[UnitHostBytes], states: float) -> HostBytes:
    """Return the host memory of a run less what is on the disk, or what it would be refused with (Rule 3).

    ``states``: how many of the optimizer's tensors per parameter may be there.
    """
    if not placed.fits:
        return replace(placed.host, activations=max(host.activations, placed.host.activations))
    stepped = sum(units[index].trained - units[index].unstepped for index in placed.spilled)
    state = whole_states(states) * stepped
    state += max(0, int(states * stepped) - state - placed.factored)  # of vectors
    weights = sum(placed.masters.values()) + sum(placed.travelling.values())
    gradients = sum(units[index].trained for index in placed.gradients)
    is_used = state + weights + gradients or not placed.spilled  # else the ring is not made
    ring = 0 if is_used else state_ring.BUFFERS * placed.buffer
    return replace(
        host,
        weights=host.weights - weights,
        gradients=host.gradients - gradients,
        optimizer=host.optimizer - state,
        ring=host.ring - ring,
    )


def states_of(
    optimizer: Any,
    module: nn.Module | None,
    dtype: torch.dtype = torch.float32,
    parameters: Sequence[Tensor] = (),
) -> float:
    """Count the tensors that an optimizer stores per parameter, in its size and type, by stepping one parameter.

    Args:
        optimizer: A name, a class, a function of parameters, or None for the module's own.
        module: The module whose own optimizer counts.
        dtype: The parameters' type.
        parameters: Those on whose shapes Adafactor's state depends, if they are known.
    """
    if isinstance(optimizer, str):
        names = {name.lower(): name for name in (*STATES, "Adafactor", *QUANTIZED)}
        if optimizer.lower() not in names:
            allowed = f"one of {', '.join(names.values())}, a class or a function of parameters"
            raise OptionError(argument="optimizer", found=optimizer, allowed=allowed)
        name = names[optimizer.lower()]
        if name in QUANTIZED:
            return STATE_NBYTES[name] / dtype.itemsize
        optimizer = getattr(torch.optim, name)
    if optimizer is None:
        configure = getattr(module, "configure_optimizers", None)
        if configure is None:
            return STATES["AdamW"]
        return mean_states(list(optimizers_in(configure())))
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if getattr(optimizer, "func", optimizer) is torch.optim.Adafactor and trained:
        return mean_states([optimizer(trained)])
    with torch.random.fork_rng(devices=[]):
        return _count_stored(optimizer)


def mean_states(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Average the count over several optimizers, by the number of parameters that each trains."""
    parameters, stored = 0, 0.0
    with torch.random.fork_rng(devices=[]):
        for made in optimizers:
            trained = {p for group in made.param_groups for p in group["params"] if p.requires_grad}
            count = sum(parameter.numel() for parameter in trained)
            parameters += count
            if type(made) is torch.optim.Adafactor:  # of which a matrix of another shape has another share
                stored += (state_nbytes(made) or 0) * count / max(1, sum(p.nbytes for p in trained))
            else:
                stored += count * _count_stored(functools.partial(type(made), **arguments_of(made)))
    return stored / max(1, parameters)


def arguments_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the defaults that are arguments of the optimizer's class: some classes add others."""
    takes = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in takes}


def optimizers_in(found: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers in what ``configure_optimizers`` returned."""
    if isinstance(found, torch.optim.Optimizer):
        yield found
    elif isinstance(found, dict):
        yield from optimizers_in(found.get("optimizer"))
    elif isinstance(found, list | tuple):
        for item in found:
            yield from optimizers_in(item)


def _made(make: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Make an optimizer of one parameter, whatever modes are in force."""
    with without_function_modes(), without_dispatch_modes(), torch.random.fork_rng(devices=[]):
        return make([nn.Parameter(torch.ones(64, 64))])


def _count_stored(make: Callable[[Any], torch.optim.Optimizer]) -> float:
    optimizer = _made(make)
    parameter: Tensor = optimizer.param_groups[0]["params"][0]
    with without_function_modes(), without_dispatch_modes(), torch.enable_grad():
        parameter.grad = torch.ones(64, 64)
        optimizer.step()
        stored = sum(value.nbytes for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
    return stored // 64 * 64 / parameter.nbytes  # without the step counter

"""torch's own optimizers on the host, several times faster and with the same bits.

The default loop of a torch optimizer makes many passes over each tensor and allocates temporaries of its size. The
update of these classes is elementwise: the same loop over pieces that fit into the cache has the same result.

1. Nothing is written to the user's optimizer. ``step()`` runs on a *shadow*, an object of the same class with the same
   attributes, whose groups list pieces of the parameters. After an exception the shadow is dropped: there is nothing to
   undo.
2. A piece is a flat view of the parameter; its gradient and its state are views of the same elements, updated in place.
   Scalar state (``step``) is the parameter's own in the first piece and a copy in the others: all end up equal.
3. A parameter is cut only if rule 2 covers all of its state. A parameter without state is stepped whole, so that torch
   creates the state as it always does. SGD without momentum never has state: its one pass would gain nothing.
4. Pieces are cut after the closure ran, because the closure makes the gradients.
5. A vectorized kernel treats the last elements of a thread's share differently, and their bits differ in half precision
   and in NaNs. So cuts and thread shares fall on whole vectors, except where the default loop has such an end too.
6. An operator that several threads share ends when the slowest of them does, and where other processes take the cores,
   each of thousands would wait so. So a step has threads of its own that take pieces in turn, each with operators that
   it shares with nobody. Nothing but the end of the step waits for the slowest one.
7. A gradient that is still in the type in which it came down (watched_parameters.py, Rule 9) is widened as it is
   stepped: in compiled code block by block, else a few pieces at a time, or a whole parameter where that is not cut, in
   the order of the loop. The bits are the same. If a group does not take the loop, all are widened first. Where
   clipping left a factor for it, it is multiplied by that where it is widened.
"""

import functools
import itertools
import operator
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from ..compat.kernels import can_share_operators, share_operators
from ..compat.modules import run_first, step_without_hooks
from ..compat.tensors import dispatch_mode_count, function_mode_count, without_dispatch
from ..memory.watched_parameters import (
    HostParameter,
    NarrowGradient,
    is_on_host,
    set_true_grad,
    true_grad,
    wide_grad,
)
from ..memory.weights import Conversion
from . import native

Group = dict[str, Any]
State = dict[str, Any]
Regrouped = tuple[list[Group], Any]  # with their state
Conversions = dict[Tensor, Conversion]  # by the parameter
_params = operator.itemgetter("params")
_nbytes = operator.attrgetter("nbytes")

# Exactly these classes: a subclass may do anything in its step.
ELEMENTWISE = frozenset({ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop})
FUSED = frozenset({SGD, Adagrad, Adam, AdamW})
PER_PARAMETER = frozenset({Adafactor, Muon})  # each parameter's step depends on all of its elements, and on no other

# ATen gives a thread at least this many elements of an elementwise kernel (at::internal::GRAIN_SIZE).
GRAIN = 32768
PIECE = 1 << 19  # elements: few enough to stay in caches, many enough for what Python costs between operators
# A tensor of fewer pieces is left whole: the caches hold enough of it for the loop's overhead per piece to cost more.
FEWEST_PIECES = 4
# With fewer pieces for each thread the loop is faster than threads that take turns in Python, unless a busy machine
# keeps its operators waiting for their slowest thread.
FEWEST_IN_TURN = 16
# Elements: a multiple of what any vectorized loop reads at once (at most 64: two AVX-512 registers in half precision).
LINE = 256
# Threads of a step (Rule 6), which take turns in Python. On a machine with more cores they share operators with others.
MOST_THREADS = 8
AT_ONCE = 4  # pieces that a thread takes


class CameDown(NamedTuple):
    """A gradient in the type in which it came down, and the factor that clipping left for it (Rule 7)."""

    values: Tensor
    factor: float = 1.0

    def widened(self) -> Tensor:
        """Make the gradient that a plain run steps with."""
        return self.values.float() if self.factor == 1.0 else self.values.float().mul_(self.factor)


Narrow = dict[int, CameDown]  # by the ids of parameters and pieces


def shadow_of(optimizer: Optimizer) -> Any:
    """Make a shadow of an optimizer, without its state: references to it are counted (state_guard.py, Rule 2)."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("state", None)
    return shadow


def all_of(optimizer: Optimizer) -> tuple[list[Group], Any]:
    """Return an optimizer's groups and state."""
    return optimizer.param_groups, optimizer.state


class ShadowStep:
    """A pair of step hooks that run each ``optimizer.step()`` on a shadow with regrouped parameters, until closed."""

    def __init__(self, regroup: Callable[[Optimizer, Conversions], Regrouped], steps_narrow: bool = False) -> None:
        self.regroup = regroup
        self._steps_narrow = steps_narrow  # Rule 7
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # Called after the closure; returns the groups and the state for the step itself. The optimizer thread may step
        # other parameters (pending_step.py).
        self.rest: Callable[[Optimizer], tuple[list[Group], Any]] = all_of
        self.end: Callable[[Optimizer], None] = lambda optimizer: None  # called after the step, before the user's hooks
        # Called before the others are regrouped; steps what is on disk and returns the groups with the others
        # (the disk). Where several streamed modules have the optimizer's parameters, each has such a pair of
        # hooks: the first one makes the shadow, and those after it add what they step.
        self.first: Callable[..., list[Group]] | None = None
        # Whether `rest` is called of this pair, not of the first one: ranks share what they step (team.py).
        self.leads = False
        # Returns the types of those of a group's parameters whose state a step makes, if it steps all others of a type
        # in another way then: none of them is stepped by itself before (device_step.py, Rule 5).
        self.begins: Callable[[Optimizer, Group, Any, Iterable[Tensor]], set[torch.dtype]] | None = None

    def attach(self, optimizer: Optimizer) -> "ShadowStep":
        """Register the hooks with an optimizer; return this object."""
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
        # The user's post hooks read the arguments that `_after` puts back, and what other ranks stepped.
        run_first(optimizer, self._hooks[1])
        return self

    def close(self) -> None:
        """Remove the hooks: the optimizer steps as it did before. Safe twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0] is not optimizer:  # it was replaced already
            steps = getattr(args[0], "shadow_steps", [])
            steps.insert(0 if self.leads else len(steps), self)
            return None
        if torch.compiler.is_compiling():
            return None
        shadow = shadow_of(optimizer)
        shadow.called_with = args, kwargs
        shadow.shadow_steps = [self]
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

        def closure_then_regroup() -> Any:
            loss = None if closure is None else closure()
            steps = shadow.shadow_steps
            shadow.param_groups, shadow.state = steps[0].rest(optimizer)
            for step in steps:
                if not all(map(step.steps_narrow, shadow.param_groups)):
                    widen_all(shadow.param_groups)
                if step.first is not None:  # also where the closure made units anew, and these need a disk
                    shadow.param_groups = step.first(shadow, {}, adopts=step is not steps[0])
            shadow.param_groups, shadow.state = steps[0].regroup(shadow, {})
            return loss

        return [shadow], {"closure": closure_then_regroup}

    def steps_narrow(self, group: Group) -> bool:
        """Whether gradients of a group are stepped in the type in which they came down (Rule 7)."""
        return self._steps_narrow and takes_the_loop(group)

    def step_groups(
        self,
        optimizer: Optimizer,
        groups: list[Group],
        state: dict[Tensor, State],
        conversions: Conversions,
    ) -> None:
        """Step these groups only, whose parameters have gradients, with this state, and convert what is at hand."""
        shadow = shadow_of(optimizer)
        shadow.param_groups, shadow.state = [group for group in groups if group["params"]], state
        if not self._steps_narrow:
            widen_all(shadow.param_groups)
        if self.first is not None:
            shadow.param_groups = self.first(shadow, conversions)
        shadow.param_groups, shadow.state = self.regroup(shadow, conversions)
        if any(map(_params, shadow.param_groups)):  # else all were stepped
            step_without_hooks(type(optimizer))(shadow)  # without hooks: they belong to the whole step

    def _after(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        shadow = args[0]
        called_with = getattr(shadow, "called_with", None)
        if called_with is not None:
            args[:] = called_with[0]
            kwargs.clear()
            kwargs.update(called_with[1])
            for step in shadow.shadow_steps:
                step.end(optimizer)


def step_in_pieces(optimizer: Optimizer, piece: int = PIECE) -> ShadowStep | None:
    """Step large host parameters in cache-sized pieces: the bits of torch's default loop, several times its speed.

    Costs a few views per piece and step, no copies; the temporaries of the loop shrink to the size of a piece. Groups
    that set ``foreach``, ``fused``, ``capturable`` or ``differentiable`` run as they are. Returns None, and changes
    nothing, if the class is not known to be elementwise.

    Args:
        optimizer: the optimizer to speed up, until the returned object is closed.
        piece: elements of a piece per thread, since each core has a cache of its own.
    """
    if type(optimizer) not in ELEMENTWISE:
        return None
    return ShadowStep(functools.partial(regroup_in_pieces, piece=piece), steps_narrow=True).attach(optimizer)


def step_each(optimizer: Optimizer) -> ShadowStep | None:
    """Have the steps of a class that steps each parameter as a whole run on a shadow, which nothing regroups yet.

    Returns None, and changes nothing, if the class is not known to be one.
    """
    if type(optimizer) not in PER_PARAMETER:
        return None
    return ShadowStep(lambda shadow, _: all_of(shadow)).attach(optimizer)


def keeps_no_state(optimizer: Optimizer, group: Group) -> bool:
    """Whether parameters of this group never have optimizer state."""
    return isinstance(optimizer, SGD) and not group["momentum"]


def each_by_itself(optimizer: Optimizer, group: Group) -> Group:
    """Return the group with whatever torch would take from its first parameter for all, so that each steps the same.

    Adafactor without an ``eps`` of the user's takes that of the first parameter's type.
    """
    if type(optimizer) is Adafactor and group["eps"][0] is None and takes_the_loop(group):
        for param in group["params"]:
            if param.grad is not None:
                return {**group, "eps": (torch.finfo(param.dtype).eps, group["eps"][1])}
    return group


def fuse(optimizer: Optimizer) -> ShadowStep | None:
    """Step host parameters with torch's fused kernels: faster still, but not the bits of the default loop.

    Costs nothing; a parameter without state takes its first step in the default loop. Groups that set ``foreach`` or
    ``fused`` run as they are. Returns None, and changes nothing, if the class has no fused kernel for the host.
    """
    if type(optimizer) not in FUSED:
        return None
    return ShadowStep(regroup_fused).attach(optimizer)


@dataclass(frozen=True)
class Cutting:
    """The way in which a step cuts parameters (Rules 5 and 6)."""

    piece: int
    threads: int
    in_turn: bool
    compiles: bool
    given: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by ids, of parameters that are cut already

    @classmethod
    def of(cls, optimizer: Optimizer, piece: int, narrow: Mapping[int, CameDown] = MappingProxyType({})) -> "Cutting":
        """Find out how this optimizer's parameters are cut in a step."""
        threads = torch.get_num_threads()
        params = itertools.chain.from_iterable(map(_params, optimizer.param_groups))
        numel = sum(map(Tensor.numel, params))
        in_turn = threads > 1 and numel >= FEWEST_IN_TURN * piece * threads and function_mode_count() == 0
        compiles = numel >= native.FEWEST and type(optimizer) in native.RECIPES
        if (in_turn or compiles) and needs_order(optimizer, narrow):
            in_turn = compiles = False
        in_turn = in_turn and dispatch_mode_count() == 0 and can_share_operators()
        return cls(piece, threads, in_turn, compiles)

    @property
    def sharers(self) -> int:
        """Threads that share an operator."""
        return _ceil_div(self.threads, MOST_THREADS) if self.in_turn else self.threads

    def leaves_whole(self, numel: int) -> bool:
        """Whether a parameter of this many elements is stepped whole."""
        # Rule 5: operators on fewer elements than GRAIN per thread are not shared by all threads.
        return numel < (GRAIN if self.in_turn else FEWEST_PIECES * self.piece) * self.threads

    def lengths(self, numel: int, most: int | None = None) -> tuple[int, ...]:
        """Return the lengths of the pieces of a parameter with `numel` elements, for a buffer of at most `most`."""
        piece = self.piece if most is None else min(self.piece, max((most - LINE) // self.sharers, 1))
        return piece_lengths(numel, self.threads, self.sharers, piece)

    def lengths_of(self, param: Tensor) -> tuple[int, ...] | None:
        """Return the lengths of the pieces of a parameter, or of a part of one; None if it is not cut."""
        given = self.given.get(id(param))
        return None if given is None and self.leaves_whole(param.numel()) else given or self.lengths(param.numel())


def regroup_in_pieces(
    optimizer: Optimizer, conversions: Conversions, piece: int = PIECE, cutting: Cutting | None = None
) -> Regrouped:
    """List pieces in the place of parameters, having stepped what threads or compiled code can step."""
    state: ChainMap[Tensor, State] = ChainMap({}, optimizer.state)  # of the pieces, and of parameters left whole
    params = list(itertools.chain.from_iterable(map(_params, optimizer.param_groups)))
    with without_dispatch():
        narrow = _as_came(params) if NarrowGradient in map(type, map(true_grad, params)) else {}
    if narrow and not all(map(takes_the_loop, optimizer.param_groups)):
        widen_all(optimizer.param_groups)
        narrow = {}
    cutting = cutting or Cutting.of(optimizer, piece, narrow)
    scalars_seen: set[int] = set()

    def cut(param: Tensor, group: Group) -> list[Tensor]:
        # An earlier parameter that shares this scalar updates it first: copies made now would be too old.
        scalars = {id(value) for value in optimizer.state.get(param, {}).values() if is_scalar(value)}
        shared = not scalars_seen.isdisjoint(scalars)
        scalars_seen.update(scalars)
        lengths = cutting.lengths_of(param)
        if shared or lengths is None:
            return [param]
        came = narrow.get(id(param))
        came_down = None if came is None else came.values
        param_state = state_in_step(optimizer, param, came_down)
        if came is not None and keeps_no_state(optimizer, group) and has_gradient_in_step(param, came_down):
            param_state = {}  # the pass is one more than the widening
        if param_state is None:
            return [param]
        pieces = _cut(param, param_state, lengths, came_down)
        if came is not None:
            del narrow[id(param)]
            parts = _parts(came.values, lengths)
            narrow.update((id(one), came._replace(values=part)) for one, part in zip(pieces, parts, strict=True))
        state.update(pieces)
        return list(pieces)

    left = functools.partial(_left_to_torch, optimizer, conversions, narrow) if cutting.compiles else _params
    cuts = bool(cutting.given) or not cutting.leaves_whole(max(map(Tensor.numel, params), default=0))
    groups = [
        {**group, "params": [part for param in left(group) for part in cut(param, group)] if cuts else left(group)}
        if takes_the_loop(group)
        else group
        for group in optimizer.param_groups
    ]
    if cutting.in_turn:
        threads = cutting.threads // cutting.sharers
        groups = _left_by_threads(optimizer, groups, state, narrow, threads, cutting.sharers)
    return (_step_in_order(optimizer, groups, state, narrow, AT_ONCE * piece) if narrow else groups), state


def _step_in_order(optimizer: Optimizer, groups: list[Group], state: Any, narrow: Narrow, most: int) -> list[Group]:
    """Step all parameters, few at once, and return the groups without parameters (Rule 7).

    Parameters that are stepped at once have at most ``most`` elements, unless it is one parameter.
    """
    left: list[Group] = []
    for group in groups:
        left.append({**group, "params": []})
        few: list[Tensor] = []
        room = most
        for param in group["params"]:
            if few and param.numel() > room:
                _step_few(optimizer, {**group, "params": few}, state, narrow)
                few, room = [], most
            few.append(param)
            room -= param.numel()
        if few:
            _step_few(optimizer, {**group, "params": few}, state, narrow)
    return left


def _step_few(optimizer: Optimizer, group: Group, state: Any, narrow: Narrow) -> None:
    shadow = shadow_of(optimizer)
    shadow.param_groups, shadow.state = [group], state
    before = []
    try:
        if narrow:
            with without_dispatch():
                for param in group["params"]:
                    if (came := narrow.get(id(param))) is not None:
                        before.append((param, true_grad(param)))
                        set_true_grad(param, came.widened())
        step_without_hooks(type(optimizer))(shadow)  # without hooks: see step_groups
    finally:
        with without_dispatch():
            for param, grad in before:
                set_true_grad(param, grad)


def widen_all(groups: Iterable[Group]) -> None:
    """Have all gradients of these groups as plain Lightning has them."""
    for group in groups:
        for param in group["params"]:
            with without_dispatch():
                wide_grad(param)


def _as_came(params: Iterable[Tensor]) -> Narrow:
    """Return the gradients that are still in the type in which they came down (Rule 7)."""
    found = {}
    for param in params:
        grad = true_grad(param)
        if type(grad) is NarrowGradient:
            if grad.wide is None:
                found[id(param)] = CameDown(grad.came_down, grad.factor)
            else:
                wide_grad(param)
    return found


def _left_by_threads(
    optimizer: Optimizer,
    groups: list[Group],
    state: ChainMap[Tensor, State],
    narrow: Narrow,
    count: int,
    sharers: int,
) -> list[Group]:
    """Step all pieces in this many threads, which take them in turn; return the groups with the other parameters."""
    pieces = set(map(id, state.maps[0]))
    todo: deque[Group] = deque()
    left: list[Group] = []
    for group in groups:
        params = [param for param in group["params"] if id(param) in pieces]
        todo.extend({**group, "params": params[at : at + AT_ONCE]} for at in range(0, len(params), AT_ONCE))
        left.append({**group, "params": [param for param in group["params"] if id(param) not in pieces]})
    inference = torch.is_inference_mode_enabled()

    def take_turns(_: int) -> None:
        assert share_operators(sharers)
        with torch.inference_mode(inference):
            while todo:
                try:
                    group = todo.popleft()
                except IndexError:  # another thread was faster
                    return
                _step_few(optimizer, group, state, narrow)

    count = min(count, len(todo))
    if count:
        with ThreadPoolExecutor(count, "superpipeline-pieces") as threads:
            list(threads.map(take_turns, range(count)))
    return left


def _left_to_torch(optimizer: Optimizer, conversions: Conversions, narrow: Narrow, group: Group) -> list[Tensor]:
    """Step what compiled code can step with the same bits; list the other parameters of the group."""
    params: list[Tensor] = group["params"]
    if keeps_no_state(optimizer, group):  # state that is there is of another momentum
        return params
    candidates: list[native.Candidate] = []
    for param in params:
        came = narrow.get(id(param))
        came_down, factor = (None, 1.0) if came is None else came
        state = state_in_step(optimizer, param, came_down) if param.dtype is torch.float32 else None
        grad = param.grad if came_down is None else came_down
        wide = () if came_down is not None or grad is None else (grad,)
        if state is not None and grad is not None and native.reads(param, *wide, *state.values()):
            conversion = conversions.get(param)
            if conversion is not None and not same_order(param, conversion.wire):
                conversion = None
            candidates.append(native.Candidate(param, grad, state, conversion, factor))
    if not native.step(optimizer, group, candidates):
        return params
    stepped = {id(candidate.param) for candidate in candidates}
    for key in stepped.intersection(narrow):
        del narrow[key]
    return [param for param in params if id(param) not in stepped]


def needs_order(optimizer: Optimizer, narrow: Mapping[int, CameDown] = MappingProxyType({})) -> bool:
    """Whether the loop's order decides: parameters, gradients or state share bytes, or torch may refuse one.

    Torch leaves out a parameter without a gradient.
    """
    stepped: list[Tensor] = []
    state: list[Any] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (grad := param.grad if (came := narrow.get(id(param))) is None else came.values) is not None:
                stepped += param, grad
            state += optimizer.state.get(param, {}).values()
    if not all(map(_is_plain, stepped)):
        return True
    tensors = stepped + [value for value in state if isinstance(value, Tensor) and value.layout is torch.strided]
    last = 0
    for start, nbytes in sorted(zip(map(Tensor.data_ptr, tensors), map(_nbytes, tensors), strict=True)):
        if start < last and nbytes:
            return True
        last = max(last, start + nbytes)
    return False


def regroup_fused(optimizer: Optimizer, _: Conversions) -> Regrouped:
    groups: list[Group] = []
    for group in optimizer.param_groups:
        fused: list[Tensor] = []
        if takes_the_loop(group) and group.get("foreach") is None and group.get("fused") is None:
            fused = [param for param in group["params"] if state_in_step(optimizer, param) is not None]
        chosen = {id(param) for param in fused}
        groups.append({**group, "params": [param for param in group["params"] if id(param) not in chosen]})
        groups.append({**group, "params": fused, "fused": True})
    return groups, optimizer.state


def has_options_on_device(optimizer: Optimizer) -> bool:
    """Whether an option of any group, such as its learning rate, is a tensor on a device, or has one."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            for one in value if isinstance(value, tuple | list) and key != "params" else (value,):
                if isinstance(one, Tensor) and not one.is_cpu:
                    return True
    return False


def takes_the_loop(group: Group) -> bool:
    """Whether torch steps this group in its default loop."""
    get = group.get
    return not (get("foreach") or get("fused") or get("capturable") or get("differentiable"))


def is_elementwise(optimizer: Optimizer, group: Group) -> bool:
    """Whether torch steps this group of one of `ELEMENTWISE` with the same bits in parts of whole lines, cut by others.

    So it does by its loop, its operators for lists (``foreach``) and its fused kernels, if these do not write to
    gradients as well: the latter for a scaler, the former for Nesterov's momentum.
    """
    scaled = group.get("fused") and vars(optimizer).get("grad_scale") is not None
    writes = scaled or (group.get("foreach") and group.get("nesterov"))
    return not (writes or group.get("capturable") or group.get("differentiable"))


def is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def state_in_step(optimizer: Optimizer, param: Tensor, came_down: Tensor | None = None) -> State | None:
    """Return the state to update if parameter, gradient and state have the same order in flat memory; else None."""
    state: State | None = optimizer.state.get(param)
    if not state or not has_gradient_in_step(param, came_down):
        return None
    if isinstance(optimizer, SGD) and "momentum_buffer" not in state:
        return None
    for other in state.values():
        if not isinstance(other, Tensor):
            return None
        if other.dim() and not (_is_plain(other) and same_order(param, other)):
            return None
    return state


def has_gradient_in_step(param: Tensor, came_down: Tensor | None = None) -> bool:
    """Whether a parameter and its gradient, which may be as it came down, have the same order in flat memory."""
    if type(param) not in (Tensor, torch.nn.Parameter, HostParameter) or not _is_plain(param):
        return False
    grad = param.grad if came_down is None else came_down
    if type(grad) is not Tensor or (came_down is None and grad.dtype != param.dtype):
        return False
    return _is_plain(grad) and same_order(param, grad)


def _is_plain(tensor: Tensor) -> bool:
    return is_on_host(tensor) and tensor.layout is torch.strided and tensor.is_floating_point()


def same_order(param: Tensor, other: Tensor) -> bool:
    if param.shape != other.shape:
        return False
    if param.is_contiguous() and other.is_contiguous():
        return True
    # `empty_like` keeps strides where memory has neither gaps nor overlaps.
    return param.stride() == other.stride() == torch.empty_like(param, device="meta").stride()


def flattened(tensor: Tensor) -> Tensor:
    """View a tensor's elements in the order of memory; the view has its version counter."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def keep_order(shadow: Any) -> None:
    """Make entries of state in the order in which torch makes them."""
    for group in shadow.param_groups:
        for param in group["params"]:
            if param.grad is not None and not keeps_no_state(shadow, group):
                shadow.state[param]  # a defaultdict


def _cut(param: Tensor, state: State, lengths: tuple[int, ...], came_down: Tensor | None = None) -> dict[Tensor, State]:
    states: list[State] = [{} for _ in lengths]
    for key, value in state.items():
        for piece_state, part in zip(states, _parts(value, lengths), strict=True):
            piece_state[key] = part
    pieces = _parts(param, lengths)
    if came_down is None:
        assert param.grad is not None
        for piece, grad in zip(pieces, _parts(param.grad, lengths), strict=True):
            piece.grad = grad
    return dict(zip(pieces, states, strict=True))


def _parts(tensor: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    if is_scalar(tensor):
        return [tensor, *tensor.detach().repeat(len(lengths) - 1).unbind()]
    # Detached, with the parameter's version counter: autograd still sees what the step changes.
    return list(flattened(tensor).split(lengths))  # type: ignore[no-untyped-call]


@functools.cache
def piece_lengths(numel: int, threads: int, sharers: int, piece: int) -> tuple[int, ...]:
    """Cut ``numel`` elements so that kernels treat each element as in one pass over all of them (Rule 5).

    That pass is shared by ``threads``, and each on a piece by ``sharers``.
    """
    share = _ceil_div(numel, min(threads, _ceil_div(numel, GRAIN)))
    if share % LINE == 0:
        share = numel
    largest = _ceil_div(piece * sharers, LINE) * LINE
    lengths = []
    for start in range(0, numel, share):
        rest = min(share, numel - start)
        while rest:
            lengths.append(_evenly_shared(min(rest, largest), sharers))
            rest -= lengths[-1]
    return tuple(lengths)


def _evenly_shared(length: int, threads: int) -> int:
    """Return the most elements, up to ``length``, that threads share without cutting a vector."""
    if length <= GRAIN:
        return length
    sharers = min(threads, length // GRAIN)
    if sharers < threads:
        return sharers * GRAIN
    return length // (threads * LINE) * threads * LINE


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)

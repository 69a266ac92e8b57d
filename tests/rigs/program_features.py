"""What user code does to a model in a random program, each a small named thing with its section of the contract.

1. A feature is a function of a `Scene` and a number, which chooses what it is done to. It does the same in a plain run
   and in a streamed one, and never asks which it is in.
2. Section 3 of the contract keeps the bits of a plain run. `error` says in which programs section 4 allows a typed
   error, `unless` in which a plain run has no one right result.
3. Random numbers come from a generator of the feature's own: those made like a weight depend on where the weight is.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import wrapped
from program_nets import REENTRANT, WIDTH, Block, Net, batch, other
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, parametrize, prune

if TYPE_CHECKING:
    from programs import Program

OUTSIDE = ("start", "batch start", "batch end", "epoch end")  # no step runs
QUIET = (*OUTSIDE, "forward", "stepped")  # no graph is there
GRADS = ("after backward", "before step")  # gradients are there, and no graph
GRAPH = ("loss", "before backward")  # a graph is there
MOMENTS = ("start", "batch start", "forward", *GRAPH, *GRADS, "stepped", "batch end", "validation", "epoch end")
WRITES, HAVE_GRADS = (*QUIET, *GRADS), (*GRADS, "batch end")

Rule = Callable[["Program"], bool]


class Fault(Exception):
    """What a program raises, and catches."""


class Feature(NamedTuple):
    """Something that user code does, in the moments in which it may (Rule 2)."""

    do: Callable[[Scene, int], None]
    moments: tuple[str, ...]
    ranks: bool  # whether DDP allows it, done on every rank alike
    then: tuple[str, ...]  # features that do something with what it left
    unless: Rule
    error: Rule


FEATURES: dict[str, Feature] = {}


def never(program: Program) -> bool:
    return False


def always(program: Program) -> bool:
    return True


def feature(
    name: str,
    moments: tuple[str, ...],
    *,
    ranks: bool = True,
    grad: bool = False,
    then: tuple[str, ...] = (),
    unless: Rule = never,
    error: Rule = never,
) -> Callable[..., Any]:
    """Register a feature; it runs without gradients unless it asks for them."""

    def register(do: Callable[[Scene, int], Any]) -> Callable[[Scene, int], Any]:
        assert name not in FEATURES, name
        FEATURES[name] = Feature(do if grad else torch.no_grad()(do), moments, ranks, then, unless, error)
        return do

    return register


class Scene:
    """What a feature finds: the net, the optimizers, what was kept, and where it says what it saw."""

    def __init__(self, net: Net, device: torch.device) -> None:
        self.net, self.device = net, device
        self.module: nn.Module = net  # the LightningModule, or the net
        self.optimizers: list[torch.optim.Optimizer] = []
        self.hooked: list[nn.Parameter] = []
        self.kept: dict[str, Any] = {}
        self.terms: dict[str, Callable[[Tensor], Tensor]] = {}  # of a batch, which the loss has too
        self.loss: Tensor | None = None  # while its graph is there
        self.activation: Tensor | None = None  # of the last block, likewise
        self.seen: list[tuple[str, str, Any]] = []
        self.in_backward: dict[str, list[tuple[str, Any]]] = {}  # by the hook that saw it: the order of hooks is free
        self.where = ""

    def let_go(self) -> None:
        """Drop what hooks and graphs refer to: no garbage collector sees through autograd's nodes."""
        for weight in (*self.net.parameters(), *self.hooked):
            for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks):
                if hooks:
                    hooks.clear()
        self.hooked.clear()
        self.kept.clear()
        self.terms.clear()
        self.loss = self.activation = None

    def see(self, what: str, value: Any) -> None:
        self.seen.append((self.where, what, kept(value)))

    def see_in(self, hook: str, value: Any) -> None:
        self.in_backward.setdefault(hook, []).append((self.where, kept(value)))

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights that can be written: no quantised ones, and none that are not made yet."""
        return [p for p in self.net.parameters() if not isinstance(p, wrapped.Coded) and not is_lazy(p)]

    def trained(self, at: int = 0, every: int = 1) -> list[nn.Parameter]:
        return [p for p in self.weights if p.requires_grad][at % 3 if every > 1 else 0 :: every]

    def weight(self, at: int) -> nn.Parameter:
        return self.weights[at % len(self.weights)]

    def alike(self, at: int) -> tuple[nn.Parameter, nn.Parameter]:
        """Two weights of one shape; the same one if there is no other."""
        one = self.weight(at)
        return one, next((p for p in self.weights if p is not one and p.shape == one.shape), one)

    def place(self, weight: nn.Parameter) -> tuple[nn.Module, str]:
        """A module and the name under which it has a weight."""
        return next((m, name) for m in self.net.modules() for name, p in m._parameters.items() if p is weight)

    def block(self, at: int) -> Block:
        return self.net.blocks[at % len(self.net.blocks)]

    def linear(self, at: int) -> nn.Linear:
        found = [m for m in self.net.modules() if isinstance(m, nn.Linear) and type(m).forward is nn.Linear.forward]
        return found[at % len(found)]

    def state(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.net.state_dict().items() if type(value) is not wrapped.Coded}

    def noise(self, like: Tensor, seed: int) -> Tensor:
        drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
        return drawn.to(like.device, like.dtype)

    def batch(self, at: int) -> Tensor:
        return batch(100 + at).to(self.device)

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in self.net.named_parameters()}

    def each_state(self) -> list[tuple[int, Any, dict[str, Any]]]:
        return [(number, p, state) for number, o in enumerate(self.optimizers) for p, state in o.state.items()]


def kept(value: Any) -> Any:
    """The values as they are now."""
    if isinstance(value, Tensor):
        return "not made yet" if is_lazy(value) else value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(item) for item in value]
    return value


def square(x: Tensor) -> Tensor:
    return x.float().square().mean()


# --- Rules


def steps_early(program: Program) -> bool:
    """Section 4: a gradient for a unit that was stepped already, a step that failed half-way."""
    return program.has_trainer and not program.manual and bool(program.option.get("optimizer_overlap", True))


def resumes(program: Program) -> bool:
    """A new model would not take the checkpoint."""
    return bool(program.resumes)


def runs_again(program: Program) -> bool:
    """A checkpoint's second run sees what a weight is by then, and does once more what is inside of it."""
    is_checkpointed = not {"Checkpointed", *REENTRANT}.isdisjoint(program.kinds)
    return "recompute" in program.activations or is_checkpointed


def differentiates_twice(program: Program) -> bool:
    return program.loss == "of an input's gradient" or program.does("loss: slopes")


def calls_several(program: Program) -> bool:
    """A second call in a graph would write what the first one saved."""
    called = program.loss in ("of two calls", "of an input's gradient") or "again" in program.kinds
    return called or program.does("loss: ", "fault: backward at the loss") or "Tied" in program.kinds


def writes_wrongly(program: Program) -> bool:
    return calls_several(program) or not {"Repeating", "Recurrent", "Lent"}.isdisjoint(program.kinds)


def refuses_writes(program: Program) -> bool:
    """Section 3: a forward that writes its weights, with recomputation, or where they travel in another type."""
    return runs_again(program) or (program.is_mixed and program.option.get("wire_dtype") != "as-is")


def not_fabrics(program: Program) -> bool:
    """What ran under a Fabric's autocast is differentiated by Fabric alone."""
    return program.door == "fabric" and program.is_mixed


def cannot_ask(program: Program) -> bool:
    """A reentrant checkpoint knows no `torch.autograd.grad`."""
    return not_fabrics(program) or not REENTRANT.isdisjoint(program.kinds)


# --- Weights that are written between steps


def each(group: str, moments: tuple[str, ...], table: dict[str, Callable[[Scene, int], Any]], **rest: Any) -> None:
    """Register the features of a table."""
    for name, do in table.items():
        feature(f"{group}: {name}", moments, **rest)(do)


def on_weight(do: Callable[[Any], Any]) -> Callable[[Scene, int], Any]:
    return lambda scene, at: do(scene.weight(at))


def write_vector(scene: Scene, at: int) -> None:
    """In place: weights that are slices of a vector have addresses by which kernels of the CPU round."""
    vector = nn.utils.parameters_to_vector(scene.weights) * 0.99
    for weight, part in zip(scene.weights, vector.split([p.numel() for p in scene.weights]), strict=True):
        weight.copy_(part.view_as(weight))


each(
    "write",
    WRITES,
    {
        "mul_": on_weight(lambda p: p.mul_(0.9)),
        "setitem": on_weight(lambda p: p.__setitem__(..., 0.1)),
        "out=": on_weight(lambda p: torch.mul(p, 0.9, out=p)),
        "foreach": on_weight(lambda p: torch._foreach_mul_([p], 0.9)),
        "clamp_": on_weight(lambda p: p.clamp_(-0.2, 0.2)),
        "constant_": on_weight(lambda p: nn.init.constant_(p, 0.2)),
        "masked_fill_": on_weight(lambda p: p.masked_fill_(p.abs() < 0.1, 0.0)),
        "index_fill_": on_weight(lambda p: p.index_fill_(0, torch.tensor([0], device=p.device), 0.1)),
        "*=": on_weight(lambda p: p.__imul__(0.9)),
        "as int": on_weight(lambda p: p.view(torch.int32)[..., 0].bitwise_xor_(64)),
        "data of [0]": on_weight(lambda p: p[0].data.mul_(0.5)),
        "data =": on_weight(lambda p: setattr(p, "data", p.data * 0.9)),
        "data = clone": on_weight(lambda p: setattr(p, "data", p.data.clone())),
        "add_": lambda scene, at: scene.weight(at).add_(scene.noise(scene.weight(at), at)),
        "copy_": lambda scene, at: scene.weight(at).copy_(scene.noise(scene.weight(at), at)),
        "copy_ of another": lambda scene, at: torch.Tensor.copy_(*scene.alike(at)),
        "add_ of another": lambda scene, at: torch.Tensor.add_(*scene.alike(at), alpha=0.1),
        "vector": write_vector,
    },
    error=steps_early,
)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "[0]": lambda p: p[0],
    "[..., -1]": lambda p: p[..., -1],
    "[::2]": lambda p: p[::2],
    "view": lambda p: p.view(-1)[:2],
    "reshape": lambda p: p.reshape(-1)[::2],
    "T": lambda p: p.T[0] if p.dim() == 2 else p[0:1],
    "permute": lambda p: p.permute(*reversed(range(p.dim())))[-1],
    "narrow": lambda p: p.narrow(0, 1, 1),
    "chunk": lambda p: p.chunk(2)[-1],
    "unbind": lambda p: p.unbind()[1],
    "as_strided": lambda p: p.as_strided((2,), (1,), p.storage_offset()),
    "diagonal": lambda p: p.diagonal() if p.dim() == 2 else p[:1],
    "view_as": lambda p: p.view_as(p),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
}
each("view", WRITES, {name: on_weight(lambda p, view=view: view(p).mul_(0.5)) for name, view in VIEWS.items()})
of_data = {f"{name}, of data": on_weight(lambda p, v=view: v(p.data).mul_(0.5)) for name, view in VIEWS.items()}
each("view", WRITES, of_data)


# --- What is kept between steps, and read or put back later


def keep(what: str, get: Callable[[Scene, int], Any]) -> Callable[[Scene, int], Any]:
    return lambda scene, at: scene.kept.__setitem__(what, get(scene, at))


views = {name: keep("view", on_weight(VIEWS[name])) for name in ("[0]", "T", "detach", "data", "view")}
each("keep", OUTSIDE, views, then=("kept: see",))
# A run may end before the graph is used.
feature("keep: with its graph", OUTSIDE, grad=True, then=("kept: see",), error=always)(keep("view", on_weight(torch.t)))
feature("kept: see", (*WRITES, *GRAPH))(lambda scene, at: scene.see("kept", scene.kept.get("view")))


@feature("keep: state", OUTSIDE, then=("kept: load",))
def keep_state(scene: Scene, at: int) -> None:
    """A copy, or the weights' own memory."""
    scene.kept["state"] = {name: value.clone() if at % 2 else value for name, value in scene.state().items()}


@feature("kept: load", OUTSIDE)
def load_kept(scene: Scene, at: int) -> None:
    scene.see("state", scene.kept.get("state"))
    scene.net.load_state_dict(scene.kept.get("state", {}), strict=False)


@feature("keep: average", WRITES)
def keep_average(scene: Scene, at: int) -> None:
    averages = scene.kept.setdefault("average", {})
    for name, weight in scene.state().items():
        if name in averages and averages[name].shape == weight.shape and weight.is_floating_point():
            averages[name].lerp_(weight.to("cpu"), 0.5)
        else:
            averages[name] = weight.to("cpu", copy=True)
    scene.see("average", averages)


def cannot_be_copied(program: Program) -> bool:
    """A weight that a hook computes has a graph; a quantised one of our own has no copy."""
    return program.does("module: parametrize") or "Quantised" in program.kinds


@feature("keep: SWA", OUTSIDE, ranks=False, unless=lambda p: cannot_be_copied(p) or p.does("weight: "))
def keep_swa(scene: Scene, at: int) -> None:
    averaged = scene.kept.get("swa") or torch.optim.swa_utils.AveragedModel(
        scene.net, device=scene.device, avg_fn=torch.optim.swa_utils.get_swa_avg_fn()
    )  # by itself it chooses a formula by the device of the weights
    averaged.update_parameters(scene.net)
    scene.kept["swa"] = averaged
    scene.see("SWA", dict(averaged.named_parameters()))


# --- Weights that are frozen, are others, or lie elsewhere


@feature("freeze: some", (*OUTSIDE, "forward"))
def freeze(scene: Scene, at: int) -> None:
    (scene.weight(at) if at % 2 else scene.block(at)).requires_grad_(False)


@feature("freeze: thaw", (*OUTSIDE, "forward"), ranks=False)
def thaw(scene: Scene, at: int) -> None:
    for weight in scene.weights:
        weight.requires_grad_(True)


@feature("freeze: and back", WRITES)
def freeze_and_thaw(scene: Scene, at: int) -> None:
    for p in {0: scene.weights, 1: [scene.weight(at)], 2: scene.trained()}[at % 3]:
        flag = p.requires_grad
        p.requires_grad_(False)
        p.requires_grad = flag


transposed = on_weight(lambda p: setattr(p, "data", p.data.t().contiguous().t()))
feature("weight: data = transposed", OUTSIDE, ranks=False, error=always)(transposed)  # section 4: a stride change


@feature("weight: exchange", OUTSIDE, ranks=False)
def exchange(scene: Scene, at: int) -> None:
    """The data of two weights, or the weights."""
    one, another = scene.alike(at)
    if at % 2:
        one.data, another.data = another.data, one.data
    else:
        places = scene.place(one), scene.place(another)
        setattr(*places[0], another)
        setattr(*places[1], one)


@feature("weight: tie", OUTSIDE, ranks=False, then=("weight: untie",), unless=resumes)
def tie(scene: Scene, at: int) -> None:
    one, another = scene.alike(at)
    setattr(*scene.place(one), another)


def calls_blocks(program: Program) -> bool:
    """New weights are on the host until the net is called."""
    return program.does("evaluate: a block", "backward: ")


@feature("weight: new", OUTSIDE, ranks=False, unless=calls_blocks)
def new_weight(scene: Scene, at: int) -> None:
    """In the optimizer too, or not."""
    weight = scene.weight(at)
    new = nn.Parameter(weight * 0.9)
    setattr(*scene.place(weight), new)
    for optimizer in scene.optimizers if at % 2 else ():
        for group in optimizer.param_groups:
            group["params"] = [new if p is weight else p for p in group["params"]]
        if weight in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(weight)


@feature("weight: untie", OUTSIDE, ranks=False, unless=lambda p: resumes(p) or calls_blocks(p))
def untie(scene: Scene, at: int) -> None:
    """Give the second place of a weight one of its own, which is trained too."""
    seen: set[Any] = set()
    for module in (module for block in scene.net.blocks[::-1] for module in block.modules()):
        for name, weight in list(module._parameters.items()):
            if weight in seen:
                setattr(module, name, new := nn.Parameter(weight.detach().clone()))
                scene.optimizers[0].add_param_group({"params": [new]})
                return
            seen |= {weight} - {None}


@feature("weight: of a new layer", OUTSIDE, ranks=False, unless=resumes)
def add_layer(scene: Scene, at: int) -> None:
    module, name = scene.block(at), f"extra_{len(list(scene.block(at).parameters()))}"
    adapter = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, device=scene.weights[0].device)  # drawn from no generator
    for weight in adapter.parameters():
        nn.init.constant_(weight, 0.01)
    setattr(module, name, adapter)
    module.register_forward_hook(lambda m, args, output, name=name: output + getattr(m, name)(args[0]))
    scene.optimizers[0].add_param_group({"params": list(adapter.parameters())})


@feature("weight: load_state_dict, assign", OUTSIDE, ranks=False, unless=calls_blocks)
def load_state_by_assignment(scene: Scene, at: int) -> None:
    state = {name: value.clone() for name, value in scene.state().items()}
    scene.net.load_state_dict(state, strict=False, assign=True)


# --- Modules


@feature("module: other code", OUTSIDE, ranks=False)
def other_code(scene: Scene, at: int) -> None:
    """A class of a block or of a layer, or a forward."""
    module = scene.linear(at) if at % 3 == 1 else scene.block(at)
    if at % 3:
        module.__class__ = other(type(module))
    else:
        module.forward = lambda x, forward=module.forward: forward(x) * 0.9


@feature("module: attribute", WRITES)
def attribute(scene: Scene, at: int) -> None:
    scene.block(at).factor = 0.1 * (at % 7)
    for module in scene.net.modules():
        if hasattr(module, "factor") and hasattr(module, "weight") and at % 2:
            module.weight.factor = 0.1 * (at % 7)


@feature("module: exchange blocks", OUTSIDE, ranks=False, unless=resumes)
def exchange_blocks(scene: Scene, at: int) -> None:
    blocks, here, there = scene.net.blocks, at % len(scene.net.blocks), (at // 7) % len(scene.net.blocks)
    blocks[here], blocks[there] = blocks[there], blocks[here]


@feature("module: copy", OUTSIDE, ranks=False, unless=lambda p: cannot_be_copied(p) or calls_blocks(p))
def copy_block(scene: Scene, at: int) -> None:
    """By deepcopy, or by pickle."""
    block, copied = scene.block(at), scene.block(at)
    with contextlib.suppress(AttributeError, pickle.PicklingError, TypeError):  # hooks may be local functions
        copied = copy.deepcopy(block) if at % 2 else pickle.loads(pickle.dumps(block))
    scene.net.blocks[at % len(scene.net.blocks)] = copied


@feature("module: drop block", OUTSIDE, ranks=False, unless=resumes)
def drop_block(scene: Scene, at: int) -> None:
    if sum(type(block) is type(scene.block(at)) for block in scene.net.blocks) > 1:  # units may name its class
        del scene.net.blocks[at % len(scene.net.blocks)]


class Times(nn.Module):
    """A parametrization that computes a weight from another one."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.9

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 0.9


def new_weights(program: Program) -> bool:
    return resumes(program) or calls_blocks(program)


@feature("module: parametrize", OUTSIDE, ranks=False, then=("module: remove parametrizations",), unless=new_weights)
def parametrize_linear(scene: Scene, at: int) -> None:
    """In one of three ways; the optimizer has the weights from which the third computes.

    The others make a parameter over the bytes of the weight (section 5), which no step writes any more.
    """
    linear = scene.linear(at)
    if parametrize.is_parametrized(linear) or type(linear._parameters.get("weight")) in (wrapped.Coded, type(None)):
        return
    if at % 3 == 0:
        parametrize.register_parametrization(linear, "weight", Times())
        return
    linear.weight.grad = None
    if at % 3 == 1:
        parametrizations.weight_norm(linear)
    else:
        nn.utils.weight_norm(linear)
        scene.optimizers[0].add_param_group({"params": [linear.weight_g, linear.weight_v]})


@feature("module: remove parametrizations", OUTSIDE, ranks=False, unless=new_weights)
def remove_parametrizations(scene: Scene, at: int) -> None:
    for module in scene.net.modules():
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
            return
        if "weight_g" in module._parameters:
            nn.utils.remove_weight_norm(module)
            scene.optimizers[0].add_param_group({"params": [module.weight]})
            return


@feature("module: prune", OUTSIDE, ranks=False, unless=resumes)
def prune_linear(scene: Scene, at: int) -> None:
    prune.l1_unstructured(scene.linear(at), "bias", 0.25)


@feature("module: buffers", WRITES)
def buffers(scene: Scene, at: int) -> None:
    for buffer in scene.net.buffers():
        if buffer.is_floating_point():
            buffer.mul_(0.9)


@feature("module: types and back", OUTSIDE, ranks=False, unless=lambda p: "Quantised" in p.kinds, error=always)
def types_and_back(scene: Scene, at: int) -> None:
    """Section 4: a type change of a weight."""
    scene.module.to(torch.bfloat16 if at % 2 else torch.float64)
    scene.module.to(torch.float32)


@feature("module: load_state_dict", OUTSIDE)
def load_state(scene: Scene, at: int) -> None:
    scene.net.load_state_dict({name: value * 0.9 for name, value in scene.state().items()}, strict=False)


moves: dict[str, Callable[[Scene, int], Any]] = {
    "eval": lambda scene, at: scene.block(at).train(at % 2 == 0),
    "to device": lambda scene, at: scene.module.to(scene.device),
    "float": lambda scene, at: scene.module.float(),
}
each("module", OUTSIDE, moves)
feature("module: block to device", OUTSIDE, ranks=False)(lambda scene, at: scene.block(at).to(scene.device))


# --- Hooks: one that comes when units were stepped already may be an error of section 4


def written(some: list[Any], at: int) -> None:
    """Write to tensors in one of several ways."""
    if at % 5 == 0:
        some[0].mul_(0.99)
    elif at % 5 == 1:
        torch._foreach_mul_(some, 0.99)
    elif at % 5 == 2:
        torch._foreach_copy_(some, [one * 0.99 for one in some])
    elif at % 5 == 3:
        torch.mul(some[-1], 0.99, out=some[-1])
    else:
        torch._foreach_lerp_(some[:1], [some[0] * 0.9], 0.1)


def stepped(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(weight.grad, alpha=-0.1)
    weight.grad = None


def hooks_weight(register: str, hook: Callable[[Scene, int, Any], Any]) -> Callable[[Scene, int], Any]:
    """Return what registers a hook of a weight, if it is trained."""

    def do(scene: Scene, at: int) -> None:
        weight = scene.weight(at // 5)
        if weight.requires_grad:
            scene.hooked.append(weight)
            getattr(weight, register)(lambda found: hook(scene, at, found))

    return do


AFTER, HOOK = "register_post_accumulate_grad_hook", "register_hook"
of_weights = {
    "scales": hooks_weight(HOOK, lambda scene, at, grad: grad * 0.5),
    "sees": hooks_weight(HOOK, lambda scene, at, grad: scene.see_in(f"hook {at}", grad)),
}
after = {
    "scales": hooks_weight(AFTER, lambda scene, at, p: setattr(p, "grad", p.grad * 0.5)),
    "steps": hooks_weight(AFTER, lambda scene, at, p: stepped(p)),
    "writes": hooks_weight(AFTER, lambda scene, at, p: written([p.grad], at)),
    "clips": hooks_weight(AFTER, lambda s, at, p: s.see_in(f"norm {at}", nn.utils.clip_grad_norm_([p], 0.05))),
}
of_modules: dict[str, Callable[[Scene, int], Any]] = {
    "forward": lambda s, at: s.block(at).register_forward_hook(lambda _, args, out: out * 1.1),
    "backward": lambda s, at: s.block(at).register_full_backward_pre_hook(lambda _, grads: (grads[0] * 0.7,)),
}
each("hook", OUTSIDE, of_weights, error=steps_early)
each("hook after accumulation", OUTSIDE, after, ranks=False, error=steps_early)
each("hook of a module", OUTSIDE, of_modules, ranks=False, error=steps_early)


def cannot_ask_once(program: Program) -> bool:
    """What runs inside a forward runs once more where that does."""
    return cannot_ask(program) or runs_again(program)


@feature("hook: differentiates by a weight", OUTSIDE, ranks=False, unless=cannot_ask_once, error=always)
def hook_differentiates(scene: Scene, at: int) -> None:
    weight = scene.net.stem.weight

    def look(_: nn.Module, args: Any) -> None:
        if args[0].requires_grad and weight.requires_grad:
            slopes = torch.autograd.grad(square(args[0]), weight, retain_graph=True, allow_unused=True)
            scene.see_in(f"slope {at}", slopes)

    scene.block(at).register_forward_pre_hook(look)


def in_layer(scene: Scene, module: nn.Module, do: Callable[[Any], Any]) -> None:
    """Have a module do something without gradients whenever it trains, before its forward."""

    def hook(layer: nn.Module, _: Any) -> None:
        if layer.training:
            with torch.no_grad():
                do(layer)

    module.register_forward_pre_hook(hook)


def does_more(program: Program) -> bool:
    """What runs inside a forward runs once more where that does."""
    return runs_again(program) or differentiates_twice(program)


def writes_wrongly_inside(program: Program) -> bool:
    return does_more(program) or writes_wrongly(program)


def refuses_writes_early(program: Program) -> bool:
    return refuses_writes(program) or steps_early(program)


@feature("inside: writes weights", OUTSIDE, ranks=False, unless=writes_wrongly_inside, error=refuses_writes_early)
def write_weights_inside(scene: Scene, at: int) -> None:
    module = scene.block(at // 5) if at % 2 else scene.linear(at // 5)
    in_layer(scene, module, lambda layer: written([p for p in layer.parameters() if type(p) is not wrapped.Coded], at))


@feature("inside: sees data", OUTSIDE, ranks=False, unless=does_more, error=steps_early)
def see_inside(scene: Scene, at: int) -> None:
    in_layer(scene, scene.linear(at), lambda layer: scene.see_in(f"layer {at}", layer.weight.data))


# --- Gradients


def on_gradient(do: Callable[[Any, Tensor], Any]) -> Callable[[Scene, int], Any]:
    """Return what does this to a weight and its gradient, if it has one."""
    return lambda scene, at: do(scene.weight(at), scene.weight(at).grad) if scene.weight(at).grad is not None else None


def gradient_exchange(scene: Scene, at: int) -> None:
    one, another = scene.alike(at)
    one.grad, another.grad = another.grad, one.grad


def gradient_surgery(scene: Scene, at: int) -> None:
    """Take from a gradient what points the way of another one."""
    one, another = (p.grad for p in scene.alike(at))
    if one is not None and another is not None:
        one.sub_(another * ((one * another).sum() / (another.square().sum() + 1)))


def gradient_norms(scene: Scene, at: int) -> None:
    scene.see("norms", torch.stack([p.grad.norm() for p in scene.weights if p.grad is not None] or [torch.zeros(())]))


def gradient_clip(scene: Scene, at: int) -> None:
    some = scene.net if at % 2 else scene.block(at)
    scene.see("norm", nn.utils.clip_grad_norm_(some.parameters(), 0.05 + 0.45 * (at % 2)))


def gradient_write_kept(scene: Scene, at: int) -> None:
    if scene.kept.get("gradient") is not None:
        scene.kept["gradient"].mul_(0.5)


each(
    "gradient",
    HAVE_GRADS,
    {
        "mul_": on_gradient(lambda p, grad: grad.mul_(0.5)),
        "[0]": on_gradient(lambda p, grad: grad[0].mul_(0.5)),
        "view": on_gradient(lambda p, grad: grad.view(-1).__setitem__(0, 0.25)),
        "T": on_gradient(lambda p, grad: grad.transpose(0, -1)[0].mul_(0.5)),
        "data": on_gradient(lambda p, grad: grad.data.mul_(0.5)),
        "as_strided": on_gradient(lambda p, grad: grad.as_strided((2,), (1,), grad.storage_offset()).mul_(0.5)),
        "zero_": on_gradient(lambda p, grad: grad.zero_()),
        "=": on_gradient(lambda p, grad: setattr(p, "grad", grad * 0.5)),
        "= None": on_gradient(lambda p, grad: setattr(p, "grad", None)),
        "data =": on_gradient(lambda p, grad: setattr(grad, "data", grad.data * 0.5)),
        "foreach": on_gradient(lambda p, grad: torch._foreach_mul_([grad], 0.5)),
        "out=": on_gradient(lambda p, grad: torch.mul(grad, 0.5, out=grad)),
        "exchange": gradient_exchange,
    },
    error=steps_early,
)
of_all: dict[str, Callable[[Scene, int], Any]] = {
    "surgery": gradient_surgery,
    "norms": gradient_norms,
    "clip norm": gradient_clip,
    "clip value": lambda scene, at: nn.utils.clip_grad_value_(scene.net.parameters(), 0.01),
}
of_kept: dict[str, Callable[[Scene, int], Any]] = {
    "see the kept one": lambda scene, at: scene.see("kept gradient", scene.kept.get("gradient")),
    "write to the kept one": gradient_write_kept,
}
each("gradient", GRADS, of_all, error=steps_early)
each("gradient", (*WRITES, *GRAPH), of_kept, error=steps_early)
feature("gradient: keep", HAVE_GRADS, error=steps_early, then=tuple(f"gradient: {name}" for name in of_kept))(
    keep("gradient", on_weight(lambda p: p.grad))
)
feature("gradient: zero_grad", (*OUTSIDE, "after backward"), error=steps_early)(
    lambda scene, at: scene.net.zero_grad(set_to_none=at % 2 == 0)
)


# --- The optimizer


@feature("optimizer: rate", (*OUTSIDE, *GRADS), error=steps_early)
def rate(scene: Scene, at: int) -> None:
    for group in (group for optimizer in scene.optimizers for group in optimizer.param_groups):
        group["lr"] = 0.01 * (1 + at % 5)


def state_written(scene: Scene, at: int) -> None:
    for _, _, state in scene.each_state()[at % 3 :: 2]:
        for value in state.values():
            if isinstance(value, Tensor) and value.dim():
                value.mul_(0.9)


def state_given(scene: Scene, at: int) -> None:
    for optimizer, state in zip(scene.optimizers, scene.kept.pop("optimizer's state", []), strict=False):
        optimizer.state.clear()
        optimizer.state.update(state)


def state_put(scene: Scene, at: int) -> None:
    for number, p, state in scene.kept.get("copies", []):
        if p in scene.optimizers[number].state:
            scene.optimizers[number].state[p] = copy.deepcopy(state)


def state_seen(scene: Scene, at: int) -> None:
    for number, optimizer in enumerate(scene.optimizers):
        scene.see(f"state {number}", dict(optimizer.state.get(scene.weight(at), {})))


of_state = {"write": state_written, "give": state_given, "put copies": state_put, "see": state_seen}
each("optimizer's state", (*WRITES, *GRAPH), of_state, error=steps_early)


@feature(
    "optimizer's state: take",
    (*OUTSIDE, "stepped"),
    then=("optimizer's state: give",),
    unless=lambda p: p.optimizer == "adagrad",  # has state from the first
)
def state_taken(scene: Scene, at: int) -> None:
    """All of it, that of a weight, or a copy of it."""
    scene.kept["optimizer's state"] = [dict(optimizer.state) for optimizer in scene.optimizers]
    for optimizer in scene.optimizers if at % 3 else ():
        kept = {} if at % 3 == 1 else {p: state for p, state in optimizer.state.items() if p is not scene.weight(at)}
        optimizer.state.clear()
        optimizer.state.update(kept)


COPIED = ("optimizer's state: put copies", "optimizer's state: load")


@feature("optimizer's state: copy", (*WRITES, *GRAPH), then=COPIED, error=steps_early)
def state_copied(scene: Scene, at: int) -> None:
    scene.kept["copies"] = [(number, p, copy.deepcopy(state)) for number, p, state in scene.each_state()]
    scene.kept["loadable"] = [copy.deepcopy(optimizer.state_dict()) for optimizer in scene.optimizers]


@feature("optimizer's state: load", OUTSIDE)
def state_loaded(scene: Scene, at: int) -> None:
    """The copy that was kept, or one of the state as it is."""
    found = scene.kept.get("loadable") or [optimizer.state_dict() for optimizer in scene.optimizers]
    for optimizer, state in zip(scene.optimizers, found, strict=False):
        ours, theirs = optimizer.param_groups, state["param_groups"]
        if [len(group["params"]) for group in ours] == [len(group["params"]) for group in theirs]:
            optimizer.load_state_dict(copy.deepcopy(state))


# --- Reads

for name, look in {
    "weight": lambda scene, p: p,
    "data": lambda scene, p: p.data,
    "detached": lambda scene, p: p.detach(),
    "gradient": lambda scene, p: p.grad,
    "norm": lambda scene, p: p.norm(),
    "norms": lambda scene, p: torch.stack([q.norm() for q in scene.weights]),
    "item": lambda scene, p: p.sum().item(),
    "list": lambda scene, p: p.tolist(),
    "array": lambda scene, p: torch.tensor(p.detach().cpu().numpy()),
    "text": lambda scene, p: str(p.detach().cpu()),
    "all": lambda scene, p: dict(scene.net.named_parameters()),
    "state": lambda scene, p: dict(scene.net.state_dict()),
    "flags": lambda scene, p: [(q.requires_grad, q.is_leaf, tuple(q.shape)) for q in scene.weights],
}.items():
    feature(f"see: {name}", MOMENTS)(lambda scene, at, look=look: scene.see("read", look(scene, scene.weight(at))))


@feature("see: deepcopy", OUTSIDE, unless=cannot_be_copied)
def see_copy(scene: Scene, at: int) -> None:
    scene.see("copy", list(copy.deepcopy(scene.block(at)).parameters()))


@feature("evaluate: the net", WRITES)
def evaluate(scene: Scene, at: int) -> None:
    scene.net.eval()
    scene.see("evaluation", scene.net(scene.batch(at)))
    scene.net.train()


@feature("evaluate: a block", WRITES)
def evaluate_block(scene: Scene, at: int) -> None:
    scene.see("evaluation", scene.block(at)(scene.batch(at)))


# --- Further graphs


@feature("backward: grad of a block", ("forward", *OUTSIDE), ranks=False, grad=True, unless=cannot_ask, error=always)
def grad_of_block(scene: Scene, at: int) -> None:
    trained = [p for p in scene.block(at).parameters() if p.requires_grad]
    if trained:
        asked = trained[1:] if at % 2 and len(trained) > 1 else trained
        scene.see("slopes", torch.autograd.grad(square(scene.block(at)(scene.batch(at))), asked, allow_unused=True))


@feature("backward: grad of an input", ("forward", *OUTSIDE), ranks=False, grad=True, unless=cannot_ask)
def grad_of_input(scene: Scene, at: int) -> None:
    x = scene.batch(at).requires_grad_()
    scene.see("slope", torch.autograd.grad(square(scene.net(x)), x, allow_unused=True))


@feature(
    "backward: of a block",
    ("forward", "batch start", "batch end"),
    ranks=False,
    grad=True,
    unless=not_fabrics,
    error=steps_early,
)
def backward_of_block(scene: Scene, at: int) -> None:
    loss = square(scene.block(at)(scene.batch(at)))
    if loss.requires_grad:
        loss.backward()


@feature("backward: twice", GRAPH, ranks=False, grad=True, unless=not_fabrics, error=steps_early)
def backward_twice(scene: Scene, at: int) -> None:
    if scene.loss is not None and scene.loss.requires_grad:
        scene.loss.backward(retain_graph=True)


@feature("backward: grad of the loss", GRAPH, ranks=False, grad=True, unless=cannot_ask, error=always)
def grad_of_loss(scene: Scene, at: int) -> None:
    trained = scene.trained(at, 2)
    if scene.loss is not None and scene.loss.requires_grad and trained:
        scene.see("slopes", torch.autograd.grad(scene.loss, trained, retain_graph=True, allow_unused=True))


@feature("backward: grad of an activation", GRAPH, ranks=False, grad=True, unless=cannot_ask)
def grad_of_activation(scene: Scene, at: int) -> None:
    if scene.loss is not None and scene.activation is not None and scene.activation.requires_grad:
        asked = scene.activation
        scene.see("slope", torch.autograd.grad(scene.loss, asked, retain_graph=True, allow_unused=True))


STARTS = ("start", "batch start")


@feature("loss: teacher", STARTS, ranks=False, unless=cannot_be_copied)
def loss_of_teacher(scene: Scene, at: int) -> None:
    teacher = copy.deepcopy(scene.net).to(scene.device).requires_grad_(False).eval()

    def term(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x).float()
        return (scene.net(x).float() - wanted).square().mean()

    scene.terms["teacher"] = term


@feature("loss: block", STARTS, ranks=False)
def loss_of_block(scene: Scene, at: int) -> None:
    scene.terms["block"] = lambda x: square(scene.block(at)(x)) * 0.1


@feature("loss: slopes", STARTS, ranks=False, unless=cannot_ask, error=always)
def loss_of_slopes(scene: Scene, at: int) -> None:
    """A penalty on the gradients of weights, which is differentiated again."""

    def term(x: Tensor) -> Tensor:
        trained, loss = scene.trained(at, 2), square(scene.net(x))
        if not trained or not loss.requires_grad:
            return loss
        slopes = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        return sum((slope.square().sum() * 0.1 for slope in slopes if slope is not None), loss * 0.1)

    scene.terms["slopes"] = term


# --- Faults


class Fails(torch.autograd.Function):
    """A function whose first backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, left: list[int]) -> Tensor:
        ctx.left = left
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.left:
            ctx.left.pop()
            raise Fault("in a function")
        return grad, None


BETWEEN = ("batch start", "forward", "batch end")


@feature("fault: backward at the loss", BETWEEN, ranks=False, grad=True, unless=not_fabrics, error=steps_early)
def fails_at_loss(scene: Scene, at: int) -> None:
    """Gradients of a backward stay; another one fails before any came, and is done again, or that of a new graph."""
    left, graphs = [1], [square(scene.net(scene.batch(at + number))) for number in range(2)]
    if not all(loss.requires_grad for loss in graphs):
        return
    graphs[0].backward()
    failing = Fails.apply(graphs[1], left)
    with contextlib.suppress(Fault):
        failing.backward(retain_graph=at % 2 == 0)
    (graphs[1] if at % 2 == 0 else square(scene.net(scene.batch(at)))).backward()
    scene.see("gradients", scene.gradients())


@feature(
    "fault: backward in a block",
    BETWEEN,
    ranks=False,
    grad=True,
    unless=lambda p: not_fabrics(p) or p.does("hook"),
    error=steps_early,
)
def fails_in_block(scene: Scene, at: int) -> None:
    """What it left is dropped; it is done again, or that of a new graph."""
    left = [1]
    handle = scene.block(at).register_forward_hook(lambda _, args, output: Fails.apply(output, left))
    loss = square(scene.net(scene.batch(at)))
    handle.remove()
    if not loss.requires_grad:
        return
    with contextlib.suppress(Fault):
        loss.backward(retain_graph=at % 2 == 0)
    left.clear()
    scene.net.zero_grad(set_to_none=at % 3 > 0)
    (loss if at % 2 == 0 else square(scene.net(scene.batch(at)))).backward()
    scene.see("gradients", scene.gradients())


@feature("fault: backward of the loss", GRAPH, ranks=False, grad=True, unless=not_fabrics)
def loss_fails(scene: Scene, at: int) -> None:
    """Before any gradient came; the program's own backward follows."""
    if scene.loss is not None and scene.loss.requires_grad:
        with contextlib.suppress(Fault):
            Fails.apply(scene.loss, [1]).backward(retain_graph=True)


def cannot_fail(program: Program) -> bool:
    """One uncaught fault in a program that goes on with the next batch."""
    several = sum(act.feature.startswith("end: ") for act in program.acts) > 1
    return several or resumes(program) or program.door == "hf" or program.closure


@feature("end: fault", (*BETWEEN, *GRAPH, *GRADS), ranks=False, unless=cannot_fail, error=steps_early)
def fault(scene: Scene, at: int) -> None:
    raise Fault("in user code")


@feature("end: fault in forward", OUTSIDE, ranks=False, unless=cannot_fail, error=steps_early)
def fault_in_forward(scene: Scene, at: int) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise Fault("in forward")

    handle = scene.linear(at).register_forward_hook(fail)


def leaves_its_graph(program: Program) -> bool:
    """The graph of a backward that is differentiated is never freed, as torch's hooks of modules are in it.

    A hook of a weight sees what a failed backward left at the next touch of a weight.
    """
    return cannot_fail(program) or program.loss == "of an input's gradient" or program.does("hook: sees")


@feature("end: fault in backward", OUTSIDE, ranks=False, unless=leaves_its_graph, error=steps_early)
def fault_in_backward(scene: Scene, at: int) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise Fault("in backward")

    handle = scene.block(at).register_full_backward_pre_hook(fail)

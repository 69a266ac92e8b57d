"""What user code does to a model in a random program: edits of weights, gradients, modules and optimizers, and reads.

1. An edit is a function of a `Scene` and a number, which chooses what it is done to. It does the same in a plain run
   and in a streamed one, and never asks which it is in.
2. It takes random numbers from a generator of its own: docs/exactness.md names the cases in which those of a tensor on
   the host are others than those of a tensor on the device.
3. `EDITS` says in which moments (programs.py) an edit is right in a plain run: one that writes what autograd saved of a
   running graph is not.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from program_nets import WIDTH, Block, Net, batch, other
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

# Moments, in their order within a batch; the first and the last three are outside of it.
OUTSIDE = ("start", "batch start", "batch end", "epoch end")  # no step runs
QUIET = (*OUTSIDE, "forward", "stepped")  # no graph is there
GRADS = ("after backward", "before step")  # gradients are there, and no graph
GRAPH = ("loss", "before backward")  # a graph is there
MOMENTS = ("start", "batch start", "forward", *GRAPH, *GRADS, "stepped", "batch end", "validation", "epoch end")


class Fault(Exception):
    """What a program raises, and catches."""


class Scene:
    """What an edit finds: the net, the optimizers, what was kept, and where it says what it saw."""

    def __init__(self, net: Net, device: torch.device) -> None:
        self.net, self.device = net, device
        self.module: nn.Module = net  # the LightningModule, or the net
        self.optimizers: list[torch.optim.Optimizer] = []
        self.kept: dict[str, Any] = {}
        self.terms: dict[str, Callable[[Tensor], Tensor]] = {}  # of a batch, which the loss has too
        self.loss: Tensor | None = None  # while its graph is there
        self.seen: list[tuple[str, str, Any]] = []
        self.in_backward: dict[
            str, list[tuple[str, Any]]
        ] = {}  # what hooks saw there, by the hook: their order is free
        self.where = ""

    def let_go(self) -> None:
        """Drop what hooks and graphs refer to: no garbage collector sees through autograd's nodes."""
        for weight in self.net.parameters():
            for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks):
                if hooks:
                    hooks.clear()
        self.kept.clear()
        self.terms.clear()
        self.loss = None

    def see(self, what: str, value: Any) -> None:
        self.seen.append((self.where, what, kept(value)))

    def see_in(self, hook: str, value: Any) -> None:
        self.in_backward.setdefault(hook, []).append((self.where, kept(value)))

    # ---- what an edit is done to

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def weight(self, at: int) -> nn.Parameter:
        return self.weights[at % len(self.weights)]

    def matrix(self, at: int) -> nn.Parameter:
        found = [p for p in self.weights if p.dim() == 2]
        return found[at % len(found)]

    def alike(self, at: int) -> tuple[nn.Parameter, nn.Parameter]:
        """Two weights of one shape; the same one if there is no other."""
        one = self.weight(at)
        return one, next((p for p in self.weights if p is not one and p.shape == one.shape), one)

    def place(self, weight: nn.Parameter) -> tuple[nn.Module, str]:
        """A module and the name under which it has a weight."""
        return next((m, name) for m in self.net.modules() for name, p in m._parameters.items() if p is weight)

    def block(self, at: int) -> Block:
        return self.net.blocks[at % len(self.net.blocks)]

    def later(self, at: int) -> list[nn.Parameter]:
        """The weights of the blocks behind one, where none comes twice."""
        blocks = list(self.net.blocks)
        behind = blocks[at % len(blocks) + 1 :] if len(set(blocks)) == len(blocks) else []
        return [p for block in behind for p in block.parameters()]

    def linear(self, at: int) -> nn.Linear:
        found = [m for m in self.net.modules() if isinstance(m, nn.Linear) and type(m).forward is nn.Linear.forward]
        return found[at % len(found)]

    def noise(self, like: Tensor, seed: int) -> Tensor:
        drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
        return drawn.to(like.device, like.dtype)

    def batch(self, at: int) -> Tensor:
        return batch(100 + at).to(self.device)


def kept(value: Any) -> Any:
    """The values as they are now."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(item) for item in value]
    return value


class Edit(NamedTuple):
    """Something that user code does."""

    do: Callable[[Scene, int], None]
    moments: tuple[str, ...]
    ranked: bool = False  # whether DDP allows it, done on every rank alike
    then: tuple[str, ...] = ()  # edits that do something with what it left


EDITS: dict[str, Edit] = {}


def edit(
    name: str, moments: tuple[str, ...], ranked: bool = False, grad: bool = False, then: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Register an edit; it runs without gradients unless it asks for them."""

    def register(do: Callable[[Scene, int], None]) -> Callable[[Scene, int], None]:
        assert name not in EDITS, name
        EDITS[name] = Edit(do if grad else torch.no_grad()(do), moments, ranked, then)
        return do

    return register


def on_weight(name: str, moments: tuple[str, ...], do: Callable[[nn.Parameter], Any], ranked: bool = False) -> None:
    """Register an edit of one weight."""

    def run(scene: Scene, at: int) -> None:
        do(scene.weight(at))

    edit(name, moments, ranked)(run)


WRITES = (*QUIET, *GRADS)

# --- Weights that are written

on_weight("mul_", WRITES, lambda p: p.mul_(0.9), ranked=True)
on_weight("setitem", WRITES, lambda p: p.__setitem__(..., 0.1), ranked=True)
on_weight("out=", WRITES, lambda p: torch.mul(p, 0.9, out=p), ranked=True)
on_weight("foreach", WRITES, lambda p: torch._foreach_mul_([p], 0.9), ranked=True)
on_weight("clamp_", WRITES, lambda p: p.clamp_(-0.2, 0.2), ranked=True)
on_weight("constant_", WRITES, lambda p: nn.init.constant_(p, 0.2), ranked=True)
on_weight("masked_fill_", WRITES, lambda p: p.masked_fill_(p.abs() < 0.1, 0.0), ranked=True)
on_weight("index_fill_", WRITES, lambda p: p.index_fill_(0, torch.tensor([0], device=p.device), 0.1), ranked=True)
on_weight("numpy", WRITES, lambda p: p.detach().cpu().numpy() is None)  # a read, on any device


@edit("add_", WRITES, ranked=True)
def add_(scene: Scene, at: int) -> None:
    scene.weight(at).add_(scene.noise(scene.weight(at), at))


@edit("copy_", WRITES, ranked=True)
def copy_(scene: Scene, at: int) -> None:
    scene.weight(at).copy_(scene.noise(scene.weight(at), at))


@edit("copy_ of another weight", WRITES, ranked=True)
def copy_other(scene: Scene, at: int) -> None:
    one, another = scene.alike(at)
    one.copy_(another)


@edit("add_ of another weight", WRITES, ranked=True)
def add_other(scene: Scene, at: int) -> None:
    one, another = scene.alike(at)
    one.add_(another, alpha=0.1)


@edit("in place of *=", WRITES, ranked=True)
def times(scene: Scene, at: int) -> None:
    weight = scene.weight(at)
    weight *= 0.9


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "[0]": lambda p: p[0],
    "[..., -1]": lambda p: p[..., -1],
    "[::2]": lambda p: p[::2],
    "view": lambda p: p.view(-1)[:2],
    "flatten": lambda p: p.flatten()[1:3],
    "reshape": lambda p: p.reshape(-1)[::2],
    "T": lambda p: p.T[0] if p.dim() == 2 else p[0:1],
    "mT": lambda p: p.mT[1] if p.dim() == 2 else p[1:2],
    "transpose": lambda p: p.transpose(0, -1)[0],
    "permute": lambda p: p.permute(*reversed(range(p.dim())))[-1],
    "narrow": lambda p: p.narrow(0, 1, 1),
    "select": lambda p: p.select(0, 1),
    "chunk": lambda p: p.chunk(2)[-1],
    "split": lambda p: p.split(1)[0],
    "unbind": lambda p: p.unbind()[1],
    "as_strided": lambda p: p.as_strided((2,), (1,), p.storage_offset()),
    "diagonal": lambda p: p.diagonal() if p.dim() == 2 else p[:1],
    "unsqueeze": lambda p: p.unsqueeze(0),
    "view_as": lambda p: p.view_as(p),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
}
for view_name, view in VIEWS.items():
    on_weight(f"write to {view_name}", WRITES, lambda p, view=view: view(p).mul_(0.5), ranked=True)
    if view_name not in ("data", "as_strided"):
        on_weight(f"write to {view_name} of data", WRITES, lambda p, view=view: view(p.data).mul_(0.5), ranked=True)
on_weight("write to data of [0]", WRITES, lambda p: p[0].data.mul_(0.5), ranked=True)
on_weight("set [0]", WRITES, lambda p: p.__setitem__(0, 0.25), ranked=True)
on_weight("set view[0]", WRITES, lambda p: p.view(-1).__setitem__(0, 0.25), ranked=True)
on_weight("write as int", WRITES, lambda p: p.view(torch.int32)[..., 0].bitwise_xor_(64), ranked=True)


def over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor over a storage, where another one lies in it."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


on_weight("write to storage", WRITES, lambda p: over(p.untyped_storage(), p).mul_(0.9), ranked=True)


@edit("write to data while a graph is there", GRAPH)
def write_in_graph(scene: Scene, at: int) -> None:
    scene.weight(at).data.mul_(0.9)


WRITE_A_WEIGHT = set(EDITS) - {"numpy"}


# --- What is kept, and written later


VIEW_IS_KEPT = ("write to what was kept", "see what was kept", "copy to what was kept", "flip requires_grad")
WHOLE_VIEWS = {"all": lambda p: p.view(-1), "t": lambda p: p.t(), "view of data": lambda p: p.data.view(-1)}
for view_name in ("[0]", "T", "detach", "data", "view", *WHOLE_VIEWS):
    edit(f"keep {view_name}", WRITES, ranked=True, then=VIEW_IS_KEPT)(
        lambda scene, at, name=view_name: scene.kept.__setitem__("view", (VIEWS | WHOLE_VIEWS)[name](scene.weight(at)))
    )
for view_name in ("[0]", "all", "T"):  # which autograd can follow
    edit(f"keep {view_name} with its graph", WRITES, ranked=True, grad=True, then=VIEW_IS_KEPT)(
        lambda scene, at, name=view_name: scene.kept.__setitem__("view", (VIEWS | WHOLE_VIEWS)[name](scene.weight(at)))
    )


@edit("keep a view of each", WRITES, ranked=True, then=("write to each that was kept",))
def keep_each(scene: Scene, at: int) -> None:
    scene.kept["views"] = [p.detach() if at % 2 else p.view(-1) for p in scene.weights]


@edit("write to each that was kept", WRITES, ranked=True)
def write_each(scene: Scene, at: int) -> None:
    if "views" in scene.kept:
        torch._foreach_mul_(scene.kept["views"], 0.9)


@edit("copy to what was kept", WRITES, ranked=True)
def copy_kept(scene: Scene, at: int) -> None:
    if (view := scene.kept.get("view")) is not None:
        view.copy_(scene.noise(view, at))


STORAGE_IS_KEPT = ("write to the kept storage",)


@edit("keep storage", WRITES, ranked=True, then=STORAGE_IS_KEPT)
def keep_storage(scene: Scene, at: int) -> None:
    weight = scene.weight(at)
    place = (weight.storage_offset(), tuple(weight.shape), weight.stride(), weight.dtype)
    scene.kept["storage"] = weight.untyped_storage(), place


@edit("write to what was kept", WRITES, ranked=True)
def write_kept(scene: Scene, at: int) -> None:
    if "view" in scene.kept:
        scene.kept["view"].mul_(0.9)


@edit("write to the kept storage", WRITES, ranked=True)
def write_kept_storage(scene: Scene, at: int) -> None:
    if "storage" in scene.kept:
        storage, (offset, shape, stride, dtype) = scene.kept["storage"]
        torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride).mul_(0.9)


@edit("see what was kept", (*WRITES, *GRAPH), ranked=True)
def see_kept(scene: Scene, at: int) -> None:
    scene.see("kept", scene.kept.get("view"))


@edit("keep state", WRITES, ranked=True, then=("restore state",))
def keep_state(scene: Scene, at: int) -> None:
    scene.kept["state"] = {name: value.clone() for name, value in scene.net.state_dict().items()}


@edit("restore state", OUTSIDE, ranked=True)
def restore_state(scene: Scene, at: int) -> None:
    if "state" in scene.kept:
        scene.net.load_state_dict(scene.kept["state"], strict=False)


ALIASES_ARE_KEPT = ("see the kept aliases", "load the kept aliases", "write to the kept aliases")


@edit("keep aliases", WRITES, ranked=True, then=ALIASES_ARE_KEPT)
def keep_aliases(scene: Scene, at: int) -> None:
    """A state_dict as it is, whose tensors are the weights' memory."""
    scene.kept["aliases"] = scene.net.state_dict()


@edit("see the kept aliases", (*WRITES, *GRAPH), ranked=True)
def see_aliases(scene: Scene, at: int) -> None:
    scene.see("aliases", dict(scene.kept.get("aliases", {})))


@edit("load the kept aliases", OUTSIDE, ranked=True)
def load_aliases(scene: Scene, at: int) -> None:
    if "aliases" in scene.kept:
        scene.net.load_state_dict(scene.kept["aliases"], strict=False)


@edit("write to the kept aliases", WRITES, ranked=True)
def write_aliases(scene: Scene, at: int) -> None:
    values = [value for value in scene.kept.get("aliases", {}).values() if value.is_floating_point()]
    for value in values[at % 3 :: 2]:
        value.mul_(0.9)


@edit("average", WRITES, ranked=True)
def average(scene: Scene, at: int) -> None:
    averages = scene.kept.setdefault("average", {})
    for name, weight in scene.net.named_parameters():
        if name in averages and averages[name].shape == weight.shape:
            averages[name].lerp_(weight.detach().to("cpu"), 0.5)
        else:
            averages[name] = weight.detach().to("cpu", copy=True)
    scene.see("average", averages)


# --- Weights that are given other data, or are others

on_weight("data =", WRITES, lambda p: setattr(p, "data", p.data * 0.9), ranked=True)
on_weight("data = clone", WRITES, lambda p: setattr(p, "data", p.data.clone()), ranked=True)
on_weight("data = transposed", OUTSIDE, lambda p: setattr(p, "data", p.data.t().contiguous().t()))
on_weight("set_", OUTSIDE, lambda p: p.set_(p.detach() * 0.9))
on_weight("swap_tensors", OUTSIDE, lambda p: torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.9)))


@edit("swap_tensors of two", OUTSIDE)
def swap_two(scene: Scene, at: int) -> None:
    one, another = scene.alike(at)
    if one is not another:
        torch.utils.swap_tensors(one, another)


@edit("exchange data", OUTSIDE, ranked=True)
def exchange_data(scene: Scene, at: int) -> None:
    one, another = scene.alike(at)
    one.data, another.data = another.data, one.data


@edit("share data", OUTSIDE)
def share_data(scene: Scene, at: int) -> None:
    one, another = scene.alike(at)
    one.data = another.data


@edit("vector", WRITES, ranked=True)
def vector(scene: Scene, at: int) -> None:
    weights = scene.weights
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(weights) * 0.99, weights)


@edit("exchange weights", OUTSIDE)
def exchange_weights(scene: Scene, at: int) -> None:
    one, another = scene.alike(at)
    places = scene.place(one), scene.place(another)
    setattr(*places[0], another)
    setattr(*places[1], one)


@edit("tie", OUTSIDE, then=("untie",))
def tie(scene: Scene, at: int) -> None:
    one, another = scene.alike(at)
    setattr(*scene.place(one), another)


@edit("new weight", OUTSIDE)
def new_weight(scene: Scene, at: int) -> None:
    weight = scene.weight(at)
    setattr(*scene.place(weight), nn.Parameter(weight * 0.9))


@edit("new weight in the optimizer", OUTSIDE)
def new_weight_in_optimizer(scene: Scene, at: int) -> None:
    weight = scene.weight(at)
    new = nn.Parameter(weight * 0.9)
    setattr(*scene.place(weight), new)
    for optimizer in scene.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if p is weight else p for p in group["params"]]
        if weight in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(weight)


@edit("untie", OUTSIDE)
def untie(scene: Scene, at: int) -> None:
    """Give the second place of a weight one of its own, which is trained too."""
    seen: set[nn.Parameter] = set()
    for block in scene.net.blocks[::-1]:
        for module in block.modules():
            for name, weight in list(module._parameters.items()):
                if weight in seen:
                    setattr(module, name, new := nn.Parameter(weight.detach().clone()))
                    scene.optimizers[0].add_param_group({"params": [new]})
                    return
                seen |= {weight} - {None}


@edit("untie blocks", OUTSIDE)
def untie_blocks(scene: Scene, at: int) -> None:
    blocks = scene.net.blocks
    for index in range(1, len(blocks)):
        if blocks[index] in list(blocks)[:index]:
            blocks[index] = copy.deepcopy(blocks[index])
            scene.optimizers[0].add_param_group({"params": list(blocks[index].parameters())})
            return


@edit("new weights in the optimizer by a group", OUTSIDE)
def add_group(scene: Scene, at: int) -> None:
    module, name = scene.block(at), f"extra_{len(list(scene.block(at).parameters()))}"
    adapter = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, device=scene.weights[0].device)  # drawn from no generator
    nn.init.constant_(adapter.weight, 0.01)
    nn.init.constant_(adapter.bias, 0.01)
    setattr(module, name, adapter)
    module.register_forward_hook(lambda m, args, output, name=name: output + getattr(m, name)(args[0]))
    scene.optimizers[0].add_param_group({"params": list(adapter.parameters())})


on_weight("freeze", OUTSIDE, lambda p: p.requires_grad_(False), ranked=True)
on_weight("freeze by attribute", OUTSIDE, lambda p: setattr(p, "requires_grad", False), ranked=True)


@edit("flip requires_grad", WRITES, ranked=True)
def flip(scene: Scene, at: int) -> None:
    """Of all weights, one, or those of a block, away and back."""
    some = {0: scene.weights, 1: [scene.weight(at)], 2: list(scene.block(at).parameters())}[at % 3]
    flags = [p.requires_grad for p in some]
    for p in some:
        p.requires_grad_(False)
    for p, flag in zip(some, flags, strict=True):
        p.requires_grad = flag


@edit("freeze block", (*OUTSIDE, "forward"), ranked=True)
def freeze_block(scene: Scene, at: int) -> None:
    scene.block(at).requires_grad_(False)


@edit("thaw all", (*OUTSIDE, "forward"))
def thaw(scene: Scene, at: int) -> None:
    scene.net.requires_grad_(True)


# --- Modules


@edit("class", OUTSIDE)
def class_of_block(scene: Scene, at: int) -> None:
    scene.block(at).__class__ = other(type(scene.block(at)))


@edit("class of linear", OUTSIDE)
def class_of_linear(scene: Scene, at: int) -> None:
    scene.linear(at).__class__ = other(nn.Linear)


@edit("forward of one", OUTSIDE)
def forward_of_one(scene: Scene, at: int) -> None:
    block = scene.block(at)
    block.forward = lambda x, forward=block.forward: forward(x) * 0.9


@edit("attribute", (*QUIET, *GRADS), ranked=True)
def attribute(scene: Scene, at: int) -> None:
    scene.block(at).factor = 0.1 * (at % 7)


@edit("attribute of a weight", (*QUIET, *GRADS), ranked=True)
def attribute_of_weight(scene: Scene, at: int) -> None:
    for module in scene.net.modules():
        if hasattr(module, "factor") and hasattr(module, "weight"):
            module.weight.factor = 0.1 * (at % 7)


@edit("exchange blocks", OUTSIDE)
def exchange_blocks(scene: Scene, at: int) -> None:
    blocks, here, there = scene.net.blocks, at % len(scene.net.blocks), (at // 7) % len(scene.net.blocks)
    blocks[here], blocks[there] = blocks[there], blocks[here]


@edit("copy block", OUTSIDE)
def copy_block(scene: Scene, at: int) -> None:
    scene.net.blocks[at % len(scene.net.blocks)] = copy.deepcopy(scene.block(at))


@edit("copy block shallowly", OUTSIDE)
def copy_block_shallowly(scene: Scene, at: int) -> None:
    scene.net.blocks[at % len(scene.net.blocks)] = copy.copy(scene.block(at))


@edit("pickle block", OUTSIDE)
def pickle_block(scene: Scene, at: int) -> None:
    with contextlib.suppress(AttributeError, pickle.PicklingError, TypeError):  # hooks may be local functions
        scene.net.blocks[at % len(scene.net.blocks)] = pickle.loads(pickle.dumps(scene.block(at)))


@edit("drop block", OUTSIDE)
def drop_block(scene: Scene, at: int) -> None:
    if sum(type(block) is type(scene.block(at)) for block in scene.net.blocks) > 1:  # units may name its class
        del scene.net.blocks[at % len(scene.net.blocks)]


@edit("weight norm", OUTSIDE, then=("remove parametrizations",))
def weight_norm(scene: Scene, at: int) -> None:
    if not nn.utils.parametrize.is_parametrized(scene.linear(at)):
        parametrizations.weight_norm(scene.linear(at))


class Times(nn.Module):
    """A parametrization that computes a weight from another one."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.9

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 0.9


@edit("parametrize", OUTSIDE, then=("remove parametrizations",))
def parametrize(scene: Scene, at: int) -> None:
    """In place: the optimizer goes on with the weight that is parametrized."""
    linear = scene.linear(at)
    if not nn.utils.parametrize.is_parametrized(linear):
        nn.utils.parametrize.register_parametrization(linear, "weight", Times())


@edit("weight norm by a hook", OUTSIDE, then=("remove weight norm",))
def old_weight_norm(scene: Scene, at: int) -> None:
    linear = scene.linear(at)
    if "weight" in linear._parameters:
        nn.utils.weight_norm(linear)
        scene.optimizers[0].add_param_group({"params": [linear.weight_g, linear.weight_v]})


@edit("remove weight norm", OUTSIDE)
def remove_weight_norm(scene: Scene, at: int) -> None:
    for module in scene.net.modules():
        if "weight_g" in module._parameters:
            nn.utils.remove_weight_norm(module)
            scene.optimizers[0].add_param_group({"params": [module.weight]})
            return


@edit("remove parametrizations", OUTSIDE)
def remove_parametrizations(scene: Scene, at: int) -> None:
    for module in scene.net.modules():
        if nn.utils.parametrize.is_parametrized(module):
            nn.utils.parametrize.remove_parametrizations(module, "weight")
            return


@edit("prune", OUTSIDE)
def prune_linear(scene: Scene, at: int) -> None:
    prune.l1_unstructured(scene.linear(at), "bias", 0.25)


@edit("buffers", WRITES, ranked=True)
def buffers(scene: Scene, at: int) -> None:
    for buffer in scene.net.buffers():
        if buffer.is_floating_point():
            buffer.mul_(0.9)


@edit("eval of a block", OUTSIDE, ranked=True)
def eval_block(scene: Scene, at: int) -> None:
    scene.block(at).train(at % 2 == 0)


@edit("to device", OUTSIDE, ranked=True)
def to_device(scene: Scene, at: int) -> None:
    scene.module.to(scene.device)


@edit("to device of a block", OUTSIDE)
def block_to_device(scene: Scene, at: int) -> None:
    scene.block(at).to(scene.device)


@edit("types and back", OUTSIDE)
def to_types(scene: Scene, at: int) -> None:
    scene.module.to(torch.bfloat16 if at % 2 else torch.float64)
    scene.module.to(torch.float32)


@edit("float", OUTSIDE, ranked=True)
def to_float(scene: Scene, at: int) -> None:
    scene.module.float()


@edit("load_state_dict", OUTSIDE, ranked=True)
def load_state(scene: Scene, at: int) -> None:
    scene.net.load_state_dict({name: value * 0.9 for name, value in scene.net.state_dict().items()})


@edit("load_state_dict, assign", OUTSIDE)
def load_state_by_assignment(scene: Scene, at: int) -> None:
    state = {name: value.clone() for name, value in scene.net.state_dict().items()}
    scene.net.load_state_dict(state, assign=True)


# --- Hooks


@edit("hook that scales", OUTSIDE, ranked=True)
def hook_scales(scene: Scene, at: int) -> None:
    weight = scene.weight(at)
    if weight.requires_grad:
        weight.register_hook(lambda grad: grad * 0.5)


@edit("hook that sees", OUTSIDE, ranked=True)
def hook_sees(scene: Scene, at: int) -> None:
    weight, name = scene.weight(at), f"hook {at}"
    if weight.requires_grad:
        weight.register_hook(lambda grad: scene.see_in(name, grad))


@edit("hook after accumulation that scales", OUTSIDE)
def hook_after_scales(scene: Scene, at: int) -> None:
    def scale(weight: nn.Parameter) -> None:
        weight.grad = weight.grad * 0.5

    if scene.weight(at).requires_grad:
        scene.weight(at).register_post_accumulate_grad_hook(scale)


@edit("hook after accumulation that steps", OUTSIDE)
def hook_after_steps(scene: Scene, at: int) -> None:
    def step(weight: nn.Parameter) -> None:
        with torch.no_grad():
            weight.add_(weight.grad, alpha=-0.1)
        weight.grad = None

    if scene.weight(at).requires_grad:
        scene.weight(at).register_post_accumulate_grad_hook(step)


@edit("forward hook", OUTSIDE, ranked=True)
def forward_hook(scene: Scene, at: int) -> None:
    scene.block(at).register_forward_hook(lambda _, args, output: output * 1.1)


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


@edit("forward hook that writes weights", OUTSIDE)
def forward_hook_writes(scene: Scene, at: int) -> None:
    def write(module: nn.Module, args: Any) -> None:
        if module.training:
            with torch.no_grad():
                written(list(module.parameters()), at)

    scene.block(at // 5).register_forward_pre_hook(write)


@edit("hook after accumulation that writes", OUTSIDE)
def hook_after_writes(scene: Scene, at: int) -> None:
    if scene.weight(at // 5).requires_grad:
        scene.weight(at // 5).register_post_accumulate_grad_hook(lambda p: written([p.grad], at))


@edit("hook after accumulation that clips", OUTSIDE)
def hook_after_clips(scene: Scene, at: int) -> None:
    """The gradient of the weight, or also those of the blocks behind its own, which are there."""
    weight = scene.weight(at)
    index = next((i for i, block in enumerate(scene.net.blocks) if any(p is weight for p in block.parameters())), None)
    behind = scene.later(index) if index is not None and at % 2 else []

    def clip(p: nn.Parameter) -> None:
        scene.see_in(f"norm {at}", nn.utils.clip_grad_norm_([p, *behind], 0.05))

    if weight.requires_grad:
        weight.register_post_accumulate_grad_hook(clip)


@edit("hook that sees later gradients", OUTSIDE)
def hook_sees_later(scene: Scene, at: int) -> None:
    behind = scene.later(at)

    def hook(_: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: scene.see_in(f"later {at}", [p.grad for p in behind]))

    scene.block(at).register_forward_hook(hook)


@edit("forward hook that differentiates", OUTSIDE)
def hook_differentiates(scene: Scene, at: int) -> None:
    """By a weight in front of the block, what comes to it."""
    weight = scene.net.stem.weight

    def hook(_: nn.Module, args: Any) -> None:
        if args[0].requires_grad and weight.requires_grad:
            loss = args[0].float().square().mean()
            scene.see_in(f"slope {at}", torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True))

    scene.block(at).register_forward_pre_hook(hook)


@edit("backward hook", OUTSIDE)
def backward_hook(scene: Scene, at: int) -> None:
    scene.block(at).register_full_backward_pre_hook(lambda _, grads: tuple(g * 0.7 for g in grads))


# --- Inside of units: what their forward and backward do with data of weights


def shrink(weight: nn.Parameter, row: bool = False) -> None:
    (weight.data[0] if row else weight.data).mul_(0.99)


def runs_in_layer(scene: Scene, at: int, do: Callable[[nn.Linear], None]) -> None:
    """Have a layer do something whenever it trains, before its forward."""
    scene.linear(at).register_forward_pre_hook(lambda layer, _: do(layer) if layer.training else None)


def runs_in_backward(scene: Scene, at: int, do: Callable[[], None]) -> None:
    """Have the backward of a layer's output do something, before it comes to the layer."""

    def hook(_: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: do())

    scene.linear(at).register_forward_hook(hook)


for view_name in ("data", "data [0]", "data T", "data view", "detach"):

    @edit(f"inside: layer that keeps {view_name}", OUTSIDE)
    def keep_inside(scene: Scene, at: int, name: str = view_name) -> None:
        _, _, view = name.partition(" ")

        def keep(layer: nn.Linear) -> None:
            data = layer.weight.detach() if name == "detach" else layer.weight.data
            scene.kept["view"] = VIEWS[view](data) if view else data

        runs_in_layer(scene, at, keep)


@edit("inside: layer that sees its data", OUTSIDE)
def see_inside(scene: Scene, at: int) -> None:
    runs_in_layer(scene, at, lambda layer: scene.see_in(f"layer {at}", layer.weight.data))


@edit("inside: layer that writes its data", OUTSIDE)
def write_inside(scene: Scene, at: int) -> None:
    """By itself, or by the weight that it found outside of any forward; also the gradient that is there."""
    found = scene.linear(at).weight

    def write(layer: nn.Linear) -> None:
        shrink(layer.weight if at % 2 else found, row=at % 4 < 2)
        if at % 3 == 0 and found.grad is not None:
            found.grad.mul_(0.9)

    runs_in_layer(scene, at, write)


@edit("inside: layer that writes its weights", OUTSIDE)
def write_weights_inside(scene: Scene, at: int) -> None:
    def write(layer: nn.Linear) -> None:
        with torch.no_grad():
            written(list(layer.parameters()), at)

    runs_in_layer(scene, at // 5, write)


@edit("inside: layer that writes what was kept", OUTSIDE)
def write_kept_inside(scene: Scene, at: int) -> None:
    runs_in_layer(scene, at, lambda _: write_data_kept(scene))


def write_data_kept(scene: Scene) -> None:
    with torch.no_grad():
        if "view" in scene.kept:
            scene.kept["view"].mul_(0.99)


@edit("inside: backward that writes data", OUTSIDE)
def write_in_backward(scene: Scene, at: int) -> None:
    weight = scene.weight(at // 3)
    runs_in_backward(scene, at, lambda: shrink(weight))


@edit("inside: backward that writes what was kept", OUTSIDE)
def write_kept_in_backward(scene: Scene, at: int) -> None:
    runs_in_backward(scene, at, lambda: write_data_kept(scene))


@edit("inside: backward that sees data", OUTSIDE)
def see_in_backward(scene: Scene, at: int) -> None:
    weight = scene.weight(at // 3)
    runs_in_backward(scene, at, lambda: scene.see_in(f"layer {at}", weight.data))


# --- Gradients

HAVE_GRADS = (*GRADS, "batch end")


def on_gradient(name: str, do: Callable[[nn.Parameter, Tensor], Any], moments: tuple[str, ...] = HAVE_GRADS) -> None:
    """Register an edit of one weight's gradient, if there is one."""

    def run(scene: Scene, at: int) -> None:
        weight = scene.weight(at)
        if weight.grad is not None:
            do(weight, weight.grad)

    edit(name, moments, ranked=True)(run)


on_gradient("gradient: mul_", lambda p, grad: grad.mul_(0.5))
on_gradient("gradient: [0]", lambda p, grad: grad[0].mul_(0.5))
on_gradient("gradient: view", lambda p, grad: grad.view(-1).__setitem__(0, 0.25))
on_gradient("gradient: T", lambda p, grad: grad.transpose(0, -1)[0].mul_(0.5))
on_gradient("gradient: data", lambda p, grad: grad.data.mul_(0.5))
on_gradient("gradient: as_strided", lambda p, grad: grad.as_strided((2,), (1,), grad.storage_offset()).mul_(0.5))
on_gradient("gradient: zero_", lambda p, grad: grad.zero_())
on_gradient("gradient: =", lambda p, grad: setattr(p, "grad", grad * 0.5))
on_gradient("gradient: = None", lambda p, grad: setattr(p, "grad", None))
on_gradient("gradient: data =", lambda p, grad: setattr(grad, "data", grad.data * 0.5))
on_gradient("gradient: set_", lambda p, grad: grad.set_(grad.clone() * 0.5))
on_gradient("gradient: storage", lambda p, grad: over(grad.untyped_storage(), grad).mul_(0.5))


on_gradient("gradient: foreach", lambda p, grad: torch._foreach_mul_([grad], 0.5))
on_gradient("gradient: out=", lambda p, grad: torch.mul(grad, 0.5, out=grad))


@edit("gradient: noise", HAVE_GRADS, ranked=True)
def gradient_noise(scene: Scene, at: int) -> None:
    if (grad := scene.weight(at).grad) is not None:
        grad.add_(scene.noise(grad, at))


@edit("gradient: exchange", HAVE_GRADS, ranked=True)
def gradient_exchange(scene: Scene, at: int) -> None:
    one, another = scene.alike(at)
    one.grad, another.grad = another.grad, one.grad


@edit("gradient: clip norm", GRADS, ranked=True)
def gradient_clip(scene: Scene, at: int) -> None:
    scene.see("norm", nn.utils.clip_grad_norm_(scene.net.parameters(), 0.5))


@edit("gradient: clip norm of a block", GRADS, ranked=True)
def gradient_clip_block(scene: Scene, at: int) -> None:
    scene.see("norm", nn.utils.clip_grad_norm_(scene.block(at).parameters(), 0.05))


@edit("gradient: clip value", GRADS, ranked=True)
def gradient_clip_value(scene: Scene, at: int) -> None:
    nn.utils.clip_grad_value_(scene.net.parameters(), 0.01)


@edit("gradient: keep", HAVE_GRADS, ranked=True, then=("gradient: write to the kept one", "gradient: see the kept one"))
def gradient_keep(scene: Scene, at: int) -> None:
    scene.kept["gradient"] = scene.weight(at).grad


@edit("gradient: write to the kept one", (*WRITES, *GRAPH), ranked=True)
def gradient_write_kept(scene: Scene, at: int) -> None:
    if scene.kept.get("gradient") is not None:
        scene.kept["gradient"].mul_(0.5)


@edit("gradient: see the kept one", (*WRITES, *GRAPH), ranked=True)
def gradient_see_kept(scene: Scene, at: int) -> None:
    scene.see("kept gradient", scene.kept.get("gradient"))


@edit("gradient: keep storage", HAVE_GRADS, ranked=True, then=("gradient: see the kept storage",))
def gradient_keep_storage(scene: Scene, at: int) -> None:
    if (grad := scene.weight(at).grad) is not None:
        scene.kept["gradient's storage"] = grad.untyped_storage(), grad.storage_offset(), grad.shape, grad.stride()


@edit("gradient: see the kept storage", (*WRITES, *GRAPH), ranked=True)
def gradient_see_kept_storage(scene: Scene, at: int) -> None:
    if "gradient's storage" in scene.kept:
        storage, *place = scene.kept["gradient's storage"]
        scene.see("kept storage", torch.empty(0, device=storage.device).set_(storage, *place))


@edit("module.zero_grad", (*OUTSIDE, "after backward"), ranked=True)
def module_zero_grad(scene: Scene, at: int) -> None:
    scene.net.zero_grad(set_to_none=at % 2 == 0)


# --- The optimizer


@edit("optimizer: rate", (*OUTSIDE, *GRADS), ranked=True)
def rate(scene: Scene, at: int) -> None:
    for optimizer in scene.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + at % 5)


@edit("optimizer: state", (*WRITES, *GRAPH), ranked=True)
def state_written(scene: Scene, at: int) -> None:
    for optimizer in scene.optimizers:
        for value in optimizer.state.get(scene.weight(at), {}).values():
            if isinstance(value, Tensor) and value.dim():
                value.mul_(0.9)


@edit("optimizer: clear state", OUTSIDE, ranked=True)
def state_cleared(scene: Scene, at: int) -> None:
    for optimizer in scene.optimizers:
        optimizer.state.pop(scene.weight(at), None)


@edit("optimizer: load_state_dict", OUTSIDE, ranked=True)
def state_loaded(scene: Scene, at: int) -> None:
    for optimizer in scene.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def each_state(scene: Scene) -> list[tuple[int, Any, dict[str, Any]]]:
    return [(number, p, state) for number, o in enumerate(scene.optimizers) for p, state in o.state.items()]


@edit("optimizer: take state away", (*OUTSIDE, "stepped"), ranked=True, then=("optimizer: give state back",) * 2)
def state_taken(scene: Scene, at: int) -> None:
    scene.kept["optimizer's state"] = [dict(optimizer.state) for optimizer in scene.optimizers]
    for optimizer in scene.optimizers if at % 3 else ():  # or kept beside
        optimizer.state.clear()


@edit("optimizer: give state back", (*WRITES, *GRAPH), ranked=True)
def state_given_back(scene: Scene, at: int) -> None:
    for optimizer, state in zip(scene.optimizers, scene.kept.pop("optimizer's state", []), strict=False):
        optimizer.state.clear()
        optimizer.state.update(state)


STATE_IS_COPIED = ("optimizer: put copies", "optimizer: load a copy")


@edit("optimizer: copy state", (*WRITES, *GRAPH), ranked=True, then=STATE_IS_COPIED)
def state_copied(scene: Scene, at: int) -> None:
    scene.kept["copies"] = [(number, p, copy.deepcopy(state)) for number, p, state in each_state(scene)]
    scene.kept["loadable"] = [copy.deepcopy(optimizer.state_dict()) for optimizer in scene.optimizers]


@edit("optimizer: put copies", (*WRITES, *GRAPH), ranked=True)
def state_put(scene: Scene, at: int) -> None:
    for number, p, state in scene.kept.get("copies", []):
        if p in scene.optimizers[number].state:
            scene.optimizers[number].state[p] = copy.deepcopy(state)


@edit("optimizer: load a copy", OUTSIDE, ranked=True)
def state_loaded_later(scene: Scene, at: int) -> None:
    for optimizer, state in zip(scene.optimizers, scene.kept.get("loadable", []), strict=False):
        if [len(group["params"]) for group in state["param_groups"]] == [
            len(group["params"]) for group in optimizer.param_groups
        ]:
            optimizer.load_state_dict(copy.deepcopy(state))


@edit("optimizer: momentum", (*WRITES, *GRAPH), ranked=True)
def momentum_halved(scene: Scene, at: int) -> None:
    for _, _, state in each_state(scene)[at % 3 :: 2]:
        for name in ("momentum_buffer", "exp_avg"):
            if state.get(name) is not None:
                state[name].mul_(0.5)


@edit("optimizer: see state", (*WRITES, *GRAPH), ranked=True)
def state_seen(scene: Scene, at: int) -> None:
    for number, optimizer in enumerate(scene.optimizers):
        scene.see(f"state {number}", dict(optimizer.state.get(scene.weight(at), {})))


# --- Reads

ALWAYS = tuple(moment for moment in MOMENTS)


def on_read(name: str, read: Callable[[Scene, nn.Parameter], Any], moments: tuple[str, ...] = ALWAYS) -> None:
    """Register a read of one weight."""
    edit(name, moments, ranked=True)(lambda scene, at: scene.see(name, read(scene, scene.weight(at))))


on_read("see weight", lambda scene, p: p)
on_read("see data", lambda scene, p: p.data)
on_read("see detached", lambda scene, p: p.detach())
on_read("see gradient", lambda scene, p: p.grad)
on_read("see norm", lambda scene, p: p.norm())
on_read("see item", lambda scene, p: p.sum().item())
on_read("see list", lambda scene, p: p.tolist())
on_read("see text", lambda scene, p: str(p.detach().cpu()))
on_read("see all", lambda scene, p: dict(scene.net.named_parameters()))
on_read("see state", lambda scene, p: dict(scene.net.state_dict()))
on_read("see flags", lambda scene, p: [(q.requires_grad, q.is_leaf, tuple(q.shape)) for q in scene.net.parameters()])
on_read("see copy", lambda scene, p: list(copy.deepcopy(scene.net.stem).parameters()), OUTSIDE)


@edit("evaluate", (*QUIET, *GRADS), ranked=True)
def evaluate(scene: Scene, at: int) -> None:
    scene.net.eval()
    scene.see("evaluation", scene.net(scene.batch(at)))
    scene.net.train()


@edit("evaluate a copy", (*QUIET, *GRADS))
def evaluate_copy(scene: Scene, at: int) -> None:
    copied = copy.copy(scene.block(at))
    copied.__class__ = other(type(copied))
    scene.see("evaluation", copied(scene.batch(at)))


@edit("evaluate a copy of the net", (*QUIET, *GRADS))
def evaluate_copy_of_net(scene: Scene, at: int) -> None:
    copied = copy.copy(scene.net)
    copied.__class__ = other(type(copied))
    scene.see("evaluation", copied(scene.batch(at)))


@edit("evaluate a block", (*QUIET, *GRADS), ranked=True)
def evaluate_block(scene: Scene, at: int) -> None:
    scene.see("evaluation", scene.block(at)(scene.batch(at)))


@edit("functional_call", (*QUIET, *GRADS), ranked=True)
def functional_call(scene: Scene, at: int) -> None:
    halved = {name: (p.detach() * 0.5).to(scene.device) for name, p in scene.net.named_parameters()}
    scene.see("functional", torch.func.functional_call(scene.net, halved, (scene.batch(at),)))


@edit("functional_call of some", (*QUIET, *GRADS), ranked=True)
def functional_call_of_some(scene: Scene, at: int) -> None:
    scene.see("functional", torch.func.functional_call(scene.net, halves(scene, at), (scene.batch(at),)))


def halves(scene: Scene, at: int) -> dict[str, Tensor]:
    """Half of some weights, on the device."""
    some = list(scene.net.named_parameters())[at % 3 :: 3]
    return {name: (p.detach() * 0.5).to(scene.device) for name, p in some}


@edit("func.grad of a block", ("forward", *OUTSIDE), grad=True)
def func_grad(scene: Scene, at: int) -> None:
    block, x = scene.block(at), scene.batch(at)
    weights = {name: p.detach().to(scene.device) for name, p in block.named_parameters()}
    state = {name: buffer.clone() for name, buffer in block.named_buffers()}  # which a transform may not write

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(block, (weights, state), (x,)).float().square().mean()

    slopes = torch.func.grad(loss)(weights)
    scene.see("slopes", slopes)


@edit("autograd.grad of a block", ("forward", *OUTSIDE), grad=True)
def autograd_grad(scene: Scene, at: int) -> None:
    block = scene.block(at)
    trained = [p for p in block.parameters() if p.requires_grad]
    if trained:
        loss, frozen = block(scene.batch(at)).float().square().mean(), trained[0]
        asked = trained[1:] if at % 2 and len(trained) > 1 else trained
        frozen.requires_grad_(frozen is asked[0])
        scene.see("slopes", torch.autograd.grad(loss, asked, allow_unused=True))
        frozen.requires_grad_(True)


@edit("backward of a block", ("forward", "batch start", "batch end"), grad=True)
def backward_of_block(scene: Scene, at: int) -> None:
    loss = scene.block(at)(scene.batch(at)).float().square().mean()
    if loss.requires_grad:
        loss.backward(inputs=[p for p in scene.weights if p.requires_grad] if at % 2 else None)


# --- What the loss has too: what a term computes, each batch computes from then on

STARTS = ("start", "batch start")


@edit("loss: of a teacher", STARTS)
def loss_of_teacher(scene: Scene, at: int) -> None:
    teacher = copy.deepcopy(scene.net).to(scene.device).requires_grad_(False).eval()

    def term(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x).float()
        return (scene.net(x).float() - wanted).square().mean()

    scene.terms["teacher"] = term


@edit("loss: of a functional_call", STARTS)
def loss_of_functional_call(scene: Scene, at: int) -> None:
    """With half of some weights, which are constants to it."""
    scene.terms["functional"] = lambda x: (
        torch.func.functional_call(scene.net, halves(scene, at), (x,)).float().square().mean()
    )


@edit("loss: of a block", STARTS)
def loss_of_block(scene: Scene, at: int) -> None:
    scene.terms["block"] = lambda x: scene.block(at)(x).float().square().mean() * 0.1


@edit("loss: of slopes", STARTS)
def loss_of_slopes(scene: Scene, at: int) -> None:
    """A penalty on the gradients of weights, which is differentiated again."""

    def term(x: Tensor) -> Tensor:
        trained = [p for p in scene.weights if p.requires_grad][at % 3 :: 2]
        loss = scene.net(x).float().square().mean()
        if not trained or not loss.requires_grad:
            return loss
        slopes = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        return sum((slope.square().sum() * 0.1 for slope in slopes if slope is not None), loss * 0.1)

    scene.terms["slopes"] = term


# --- Backward, in a running graph


@edit("backward of the loss before", GRAPH, grad=True)
def backward_before(scene: Scene, at: int) -> None:
    if scene.loss is not None and scene.loss.requires_grad:
        scene.loss.backward(retain_graph=True)


@edit("autograd.grad of the loss", GRAPH, grad=True)
def grad_of_loss(scene: Scene, at: int) -> None:
    trained = [p for p in scene.weights if p.requires_grad][at % 3 :: 2]
    if scene.loss is not None and scene.loss.requires_grad and trained:
        scene.see("slopes", torch.autograd.grad(scene.loss, trained, retain_graph=True, allow_unused=True))


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


def fail_once(left: list[int]) -> None:
    if left:
        left.pop()
        raise Fault("in a hook")


@edit("backward that fails at the loss", ("batch start", "forward", "batch end"), grad=True)
def fails_at_loss(scene: Scene, at: int) -> None:
    """Gradients of a backward stay; another one fails before any came, and is done again, or that of a new graph."""
    left, graphs = [1], [scene.net(scene.batch(at + number)).float().square().mean() for number in range(2)]
    if not all(loss.requires_grad for loss in graphs):
        return
    graphs[0].backward()
    failing = Fails.apply(graphs[1], left)
    with contextlib.suppress(Fault):
        failing.backward(retain_graph=at % 2 == 0)
    (graphs[1] if at % 2 == 0 else scene.net(scene.batch(at)).float().square().mean()).backward()
    scene.see("gradients", {name: p.grad for name, p in scene.net.named_parameters()})


@edit("backward that fails in a block", ("batch start", "forward", "batch end"), grad=True)
def fails_in_block(scene: Scene, at: int) -> None:
    """What it left is dropped; it is done again, or that of a new graph."""
    left = [1]

    def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        if at % 4 < 2:
            return Fails.apply(output, left)
        if output.requires_grad:
            output.register_hook(lambda grad: fail_once(left))
        return output

    handle = scene.block(at).register_forward_hook(hook)
    loss = scene.net(scene.batch(at)).float().square().mean()
    handle.remove()
    if not loss.requires_grad:
        return
    with contextlib.suppress(Fault):
        loss.backward(retain_graph=at % 2 == 0)
    left.clear()
    scene.net.zero_grad(set_to_none=at % 3 > 0)
    (loss if at % 2 == 0 else scene.net(scene.batch(at)).float().square().mean()).backward()
    scene.see("gradients", {name: p.grad for name, p in scene.net.named_parameters()})


@edit("backward of the loss that fails", GRAPH, grad=True)
def loss_fails(scene: Scene, at: int) -> None:
    """Before any gradient came; the program's own backward follows."""
    if scene.loss is not None and scene.loss.requires_grad:
        with contextlib.suppress(Fault):
            Fails.apply(scene.loss, [1]).backward(retain_graph=True)


@edit("fault", ("batch start", "forward", "loss", "before backward", "after backward", "before step", "batch end"))
def fault(scene: Scene, at: int) -> None:
    raise Fault("in user code")


@edit("fault in forward", OUTSIDE)
def fault_in_forward(scene: Scene, at: int) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise Fault("in forward")

    handle = scene.block(at).register_forward_hook(fail)


@edit("fault in backward", OUTSIDE)
def fault_in_backward(scene: Scene, at: int) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise Fault("in backward")

    handle = scene.block(at).register_full_backward_pre_hook(fail)


FAULTS = {"fault", "fault in forward", "fault in backward"}
STRUCTURE = {"new weights in the optimizer by a group", "drop block", "weight norm", "prune", "tie", "exchange blocks"}
STRUCTURE |= {"parametrize", "weight norm by a hook", "untie", "untie blocks"}
CALLS = {  # by itself
    *("evaluate a block", "evaluate a copy", "evaluate a copy of the net"),
    *("autograd.grad of a block", "backward of a block"),
}
NEW = {"copy block", "pickle block", "load_state_dict, assign", "new weight", "new weight in the optimizer"}
NEW |= {"untie", "untie blocks", "weight norm by a hook", "remove weight norm"}  # weights
TERMS = {name for name in EDITS if name.startswith("loss: ")}
ON_LOSS = {"backward of the loss before", "autograd.grad of the loss", "backward of the loss that fails"}
COPIES = {"copy block", "pickle block", "evaluate a copy of the net", "loss: of a teacher"}  # by deepcopy
WRITES_IN_FORWARD = {"forward hook that writes weights", "inside: layer that writes its weights"}
HOOKED = {name for name in EDITS if "hook" in name or name.startswith("inside: backward")}
OF_WEIGHTS = {"hook that scales", "hook that sees"} | {name for name in HOOKED if name.startswith("hook after")}
FUNCTIONAL = {"functional_call", "functional_call of some", "loss: of a functional_call"}
REPLACES = {"data =", "data = clone", "data = transposed", "exchange data", "share data", "vector", "set_"}
REPLACES |= {"types and back"}
WRITES_KEPT = (  # through one view each
    {"write to what was kept", "copy to what was kept", "inside: layer that writes what was kept"},
    {"write to each that was kept"},
    {"write to the kept aliases"},
    {"write to the kept storage"},
)
INSIDE = {name for name in EDITS if name.startswith("inside: ")}
AGAIN = {name for name in INSIDE if "keeps" not in name}  # does more where a forward runs again

"""Models under torch's tensor parallelism on each rank of a test, trained plainly and streamed, and compared there.

A run returns everything that can be seen of it by name; `compare` the names of what differs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import parametrize

import parity
import sp_lightning
from sp_lightning.host.device import aligned

HOST = torch.device("cpu")
WORDS = 31  # an odd number: two ranks have shards of different sizes
WIDTH = 16  # of all models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def stack() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *(Block(WIDTH) for _ in range(4)), nn.Linear(WIDTH, WORDS, bias=False)
    )


def in_blocks(mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism inside of blocks; all else is plain, on each rank the same."""
    model = stack()
    for block in list(model)[1:5]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def in_sequence(mesh: DeviceMesh, head: Any = None) -> nn.Module:
    """Every parameter is a DTensor; norms see a part of the sequence, and their gradients are partial sums."""
    model = stack()
    blocks = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for index in range(1, 5):
        parallelize_module(model[index], mesh, blocks)
    first = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    last = head or ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(model, mesh, {"0": first, "5": last})


def unevenly(mesh: DeviceMesh, hidden: int = 4) -> nn.Module:
    """Layers that the ranks cannot share evenly: of three, the last one has no element of some."""
    model = stack()
    for block in list(model)[1:5]:
        block.up, block.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)  # type: ignore[assignment]
        parallelize_module(block, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    return model


def tied(mesh: DeviceMesh) -> nn.Module:
    model: Any = in_sequence(mesh)
    model[5].weight = model[0].weight
    return model  # type: ignore[no-any-return]


def with_sharded_loss(mesh: DeviceMesh) -> nn.Module:
    last = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    return in_sequence(mesh, last)


class Penalised(nn.Module):
    """Reads weights outside of their units."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        block = self.model[1]
        penalty = block.up.weight.square().mean() + block.norm.weight.norm()
        return self.model(words) + penalty.full_tensor()  # type: ignore[no-any-return]


def read_outside(mesh: DeviceMesh) -> nn.Module:
    return Penalised(in_sequence(mesh))


def from_checkpoint(kind: str, mesh: DeviceMesh) -> nn.Module:
    """A model of transformers that `from_pretrained` cuts by its own `tp_plan`, on the mesh that it makes."""
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        attn_implementation="sdpa",
        use_cache=False,
    )
    if kind == "Mixtral":
        config.num_local_experts = 4
    architecture = getattr(transformers, f"{kind}ForCausalLM")
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, 0)
    if dist.get_rank() == 0:
        architecture(config).save_pretrained(folders[0])
    dist.barrier()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # newer versions have another argument
        if mesh.device_type == "cpu":  # they take the accelerator that there is
            stack.enter_context(mock.patch.object(torch._C, "_get_accelerator", lambda: HOST))
        model = architecture.from_pretrained(folders[0], tp_plan="auto").train()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folders[0]))
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return Logits(model)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        return self.model(words).logits  # type: ignore[no-any-return]


class Skipping(nn.Module):
    """Leaves out a block on ranks of one replica, as a run with stochastic depth does."""

    def __init__(self, blocks: nn.Module, left_out: int | None) -> None:
        super().__init__()
        self.blocks, self.left_out = blocks, left_out

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):  # type: ignore[arg-type]
            x = x if index == self.left_out else block(x)
        return x


def skipping(mesh: DeviceMesh) -> nn.Module:
    return Skipping(in_blocks(mesh), 2 if dist.get_rank() // mesh.size() == 1 else None)


MAKERS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "in blocks": in_blocks,
    "in sequence": in_sequence,
    "skipping": skipping,
    "unevenly": unevenly,
    "tied": tied,
    "read outside": read_outside,
    "sharded loss": with_sharded_loss,
    **{
        f"{kind} from a checkpoint".lower(): functools.partial(from_checkpoint, kind)
        for kind in ("Llama", "Qwen3", "Mixtral")
    },
}


# ---- a run, and what is seen of it


def optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """Make the optimizers of a run: one, or two for every other parameter each."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "several":
        return [torch.optim.AdamW(parameters[::2], 1e-2), torch.optim.SGD(parameters[1::2], 1e-1, momentum=0.9)]
    return [torch.optim.AdamW(parameters, 1e-2, foreach=kind == "foreach")]


def local(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    found = value.to_local() if isinstance(value, DTensor) else value
    return found.wait() if hasattr(found, "trigger_wait") else found


def seen(name: str, value: Any, whole: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield what there is to see in a value: of a DTensor its layout and this rank's part, or all of it."""
    if whole and isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, DTensor):
        yield f"{name} as", f"{value.placements} {tuple(value.shape)} {value.stride()}"
        yield name, local(value).detach().cpu().clone()
    elif isinstance(value, Tensor):
        yield name, value.detach().cpu().clone()
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from seen(f"{name}.{key}", part, whole)
    else:
        yield name, value


def train(
    model: nn.Module,
    stepped_by: list[torch.optim.Optimizer],
    device: torch.device,
    steps: int,
    accumulate: int,
    clip: float | None,
    sharded_loss: bool,
    edits: bool = False,
    freezes: bool = False,
    seed: int = 1,
    called: Any = None,
    no_sync: Callable[[], Any] = contextlib.nullcontext,
) -> Iterator[tuple[str, Any]]:
    """Train a model, perhaps by what wraps it, and yield what is seen after each step."""
    draw = torch.Generator().manual_seed(seed)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for step in range(steps):
        if freezes:
            list(names)[4].requires_grad_(step == 1)
        for batch in range(accumulate):
            words = torch.randint(WORDS, (3, 8), generator=draw).to(device)
            with (
                no_sync() if batch + 1 < accumulate else contextlib.nullcontext(),
                loss_parallel() if sharded_loss else contextlib.nullcontext(),
            ):
                loss = F.cross_entropy((called or model)(words).flatten(0, 1), words.flatten())
                loss.backward()  # type: ignore[no-untyped-call]
            yield from seen(f"{step}.{batch} loss", loss)
        if clip is not None:
            yield from seen(f"{step} norm", nn.utils.clip_grad_norm_(as_dtensors(model), clip))
        if edits:
            edit_gradients(model)
        for name, parameter in model.named_parameters():
            yield from seen(f"{step} gradient of {name}", parameter.grad)
        for optimizer in stepped_by:
            optimizer.step()
            optimizer.zero_grad()
        for number, _ in enumerate(edits_between_steps(model) if edits else ()):
            with torch.no_grad():
                yield from seen(f"{step} after edit {number}", model(words))
        for name, parameter in model.named_parameters():
            yield from seen(f"{step} {name}", parameter)
    for number, optimizer in enumerate(stepped_by):
        for parameter, state in optimizer.state.items():
            yield from seen(f"state {number} of {names[parameter]}", state)
    yield from seen("state_dict", model.state_dict())
    with torch.no_grad():
        yield from seen("evaluated", model(words))


def edit_gradients(model: nn.Module) -> None:
    """Write to some gradients, and give some parameters others."""
    for index, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            if index % 3 == 0:
                parameter.grad.mul_(0.5)
            elif index % 3 == 1:
                parameter.grad = parameter.grad + parameter


def edits_between_steps(model: nn.Module) -> Iterator[None]:
    """Write to parameters in one way after the other."""
    parameters = list(model.parameters())
    yield  # the step's own writes
    with torch.no_grad():
        parameters[1].mul_(1.5)
        yield
        torch.nn.init.constant_(parameters[0], 0.5)
        yield
        parameters[2][0] = 0.25
        yield
        torch._foreach_add_(parameters[2:3], 0.25)
        yield
        local(parameters[3]).sub_(0.125)
        yield
        parameters[4].data.add_(0.0625)
        yield
    named = dict(model.named_parameters())
    saved = io.BytesIO()
    torch.save([copy.deepcopy(named), named], saved)
    for stored in torch.load(io.BytesIO(saved.getvalue()), weights_only=False):
        assert {type(value) for value in stored.values()} <= {nn.Parameter, DTensor}
        model.load_state_dict({name: value * 1.25 for name, value in stored.items()})
        yield


def begin(simulated: bool) -> tuple[DeviceMesh, DeviceMesh, torch.device]:
    """Begin on this rank: a mesh for the plain run, which is on the CPU, and one for the streamed run's device."""
    connect(importlib.import_module("simccl").register() if simulated else "gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if not simulated:
        return mesh, mesh, torch.device("cpu")
    return mesh, init_device_mesh("simgpu", (dist.get_world_size(),)), torch.device("simgpu:0")


def connect(backend: str) -> None:
    if not dist.is_initialized():
        rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, rank=rank, world_size=world)


def made(name: str, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[name](mesh)


def error_of(attempt: Callable[[], Any]) -> str:
    """Return the typed error of an attempt."""
    try:
        attempt()
    except sp_lightning.errors.SuperpipelineError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what differs."""
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if parity.difference(one.get(name), other.get(name)) is not None]


def compare(
    name: str,
    simulated: bool,
    options: dict[str, Any],
    kind: str = "loop",
    steps: int = 3,
    accumulate: int = 1,
    clip: float | None = None,
    edits: bool = False,
    freezes: bool = False,
    grouped: bool = False,
) -> dict[str, Any]:
    """Train a model plainly and streamed; return the names of what differs, and figures.

    ``grouped``: as one of a data axis that has no other rank.
    """
    theirs, ours, device = begin(simulated)
    sharded_loss = name == "sharded loss"
    plain = made(name, theirs)
    expected = dict(train(plain, optimizers(plain, kind), HOST, steps, accumulate, clip, sharded_loss, edits, freezes))
    model = made(name, ours)
    count = sum(aligned(local(parameter).nbytes) for parameter in model.parameters())
    group = dist.new_subgroups(1)[0] if grouped else None
    with sp_lightning.stream(model, device, group=group, **({"window": 1} | options)) as handle:
        stepped_by = optimizers(model, kind)
        found = dict(train(model, stepped_by, device, steps, accumulate, clip, sharded_loss, edits, freezes))
        stats = handle.stats()
        starts = [(unit.slab.data_ptr(), unit.slab.numel()) for unit in handle.units if not unit.is_resident]
        slabs = sum(size for _, size in starts)
        in_slabs = all(
            any(0 <= local(parameter.detach()).data_ptr() - start < size for start, size in starts)
            for parameter in model.parameters()
        )
    after = dict(seen("state_dict", model.state_dict()))
    closed = difference(after, {name: expected[name] for name in after})
    kinds = [type(parameter) for parameter in model.parameters()]
    return {
        "differ": difference(expected, found),
        "differ once closed": closed,
        "kinds": kinds == [type(parameter) for parameter in plain.parameters()],
        "seen": len(expected),
        "fetches": stats["fetches"],
        "slabs": slabs,
        "in slabs": in_slabs,
        "bytes": count,
    }


def resumed(name: str, streams: tuple[bool, bool], kind: str, simulated: bool) -> list[str]:
    """Train one half plainly or streamed, and then the other; return what differs from a plain run."""
    theirs, ours, device = begin(simulated)
    settings: dict[str, Any] = {"steps": 2, "accumulate": 2, "clip": None, "sharded_loss": False}

    def halfway(to_stream: bool, state: Any) -> tuple[dict[str, Any], Any]:
        model = made(name, ours if to_stream else theirs)
        at = device if to_stream else HOST
        with sp_lightning.stream(model, at, window=1) if to_stream else contextlib.nullcontext():
            stepped_by = optimizers(model, kind)
            if state is not None:
                model.load_state_dict(state[0])
                for optimizer, loaded in zip(stepped_by, state[1], strict=True):
                    optimizer.load_state_dict(loaded)
            found = dict(train(model, stepped_by, at, seed=1 if state is None else 2, **settings))
            return found, copy.deepcopy((model.state_dict(), [optimizer.state_dict() for optimizer in stepped_by]))

    expected, state = halfway(False, None)
    then, _ = halfway(False, state)
    found, state = halfway(streams[0], None)
    went_on, _ = halfway(streams[1], state)
    return difference(expected, found) + difference(then, went_on)


# ---- data parallelism over another axis of the mesh


class FromLocal(nn.Module):
    """A parametrization that makes a DTensor of a plain parameter, as a user may do for DDP."""

    def __init__(self, parameter: Any) -> None:
        super().__init__()
        self.mesh, self.placements = parameter.device_mesh, parameter.placements
        self.shape, self.stride = parameter.shape, parameter.stride()

    def forward(self, local: Tensor) -> Tensor:
        return DTensor.from_local(  # type: ignore[no-any-return]
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def unwrapped(model: nn.Module) -> nn.Module:
    shards: dict[Any, nn.Parameter] = {}  # one for each parameter, which may be tied
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor):
                shard = nn.Parameter(local(parameter).detach().clone(), parameter.requires_grad)
                shard = shards.setdefault(parameter, shard)
                delattr(module, name)
                module.register_parameter(name, shard)
                parametrize.register_parametrization(module, name, FromLocal(parameter), unsafe=True)
    return model


def as_dtensors(model: nn.Module) -> list[Tensor]:
    """List a model's parameters, and of those of `unwrapped` DTensors over them, with gradients over theirs."""
    makers: dict[Any, Any] = {}
    for module in model.modules():
        lists: Any = getattr(module, "parametrizations", {})
        makers |= {one.original: one[0] for one in lists.values()}
    found: list[Tensor] = []
    for one, maker in makers.items():
        with torch.no_grad():
            made = maker(one.detach()).requires_grad_(one.requires_grad)
            made.grad = None if one.grad is None else maker(one.grad)
        found.append(made)
    return found or list(model.parameters())


def parts(found: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Return this rank's parts of what is seen, by the names that they have without parametrizations."""
    plainly = ((name.replace("parametrizations.", "").replace(".original", ""), value) for name, value in found)
    return {name: value for name, value in plainly if not name.endswith(" as")}


def grid(simulated: bool, data: int = 2) -> tuple[DeviceMesh, DeviceMesh, torch.device]:
    begin(simulated)
    names, shape = ("dp", "tp"), (data, dist.get_world_size() // data)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if not simulated:
        return mesh, mesh, torch.device("cpu")
    return mesh, init_device_mesh("simgpu", shape, mesh_dim_names=names), torch.device("simgpu:0")


def compare_on_a_grid(
    name: str,
    simulated: bool,
    options: dict[str, Any],
    kind: str = "loop",
    accumulate: int = 1,
    clip: float | None = None,
    data: int = 2,
) -> dict[str, Any]:
    """Train on ranks in two axes: under DDP over shards, and streamed with the group of the data axis."""
    theirs, ours, device = grid(simulated, data)
    how = 3, accumulate, clip, name == "sharded loss"
    plain, group, replica = unwrapped(made(name, theirs["tp"])), theirs["dp"].get_group(), theirs["dp"].get_local_rank()
    ddp = nn.parallel.DistributedDataParallel(plain, process_group=group, find_unused_parameters=name == "skipping")
    if data > 2:
        ddp.register_comm_hook(group, sp_lightning.tree_hook)
    under_ddp = {"seed": replica, "called": ddp, "no_sync": ddp.no_sync}
    expected = parts(train(plain, optimizers(plain, kind), HOST, *how, **under_ddp))
    model = made(name, ours["tp"])
    with sp_lightning.stream(model, device, group=ours["dp"].get_group(), **({"window": 1} | options)) as handle:
        stepped_by = optimizers(model, kind)
        found = parts(train(model, stepped_by, device, *how, seed=replica, no_sync=handle.no_sync))
        shared, fetches = (handle.team.slabs is not None) == (data > 1), handle.stats()["fetches"]
    return {"differ": difference(expected, found), "seen": len(expected), "shared": shared, "fetches": fetches}


def units_where_one_rank_has_nothing() -> list[Any]:
    """List the units of a model, and their modules, of whose layers all but the first rank have no element."""
    mesh, _, device = begin(False)
    with sp_lightning.stream(unevenly(mesh, 1), device) as handle:
        places = {module: name for name, module in handle.module.named_modules()}
        roots = [(unit, places[module]) for module, unit in handle.visits.entries.items()]
        return [(unit.name, [name for other, name in roots if other is unit]) for unit in handle.units]


def mixed_up() -> str:
    """Return the error where the ranks of a group have different shards of the same shape."""
    mesh, _, device = grid(False)
    model = made("in blocks", mesh["tp"])
    return error_of(lambda: sp_lightning.stream(model, device, group=mesh["tp"].get_group()))


def refused(name: str, options: dict[str, Any]) -> str:
    """Return the error of an attempt to stream, and check that it left a plain model."""
    mesh, _, device = begin(False)
    model = made(name, mesh)
    error = error_of(lambda: sp_lightning.stream(model, device, **options))
    dict(train(model, optimizers(model, "loop"), device, 1, 1, None, False))
    return error


def refused_by_fabric() -> str:
    """Return the error of a loop by Fabric, and check that it left a plain model."""
    mesh, _, device = begin(False)
    model = made("in blocks", mesh)
    with mock.patch.dict(os.environ):
        fabric = L.Fabric(strategy="superpipeline", accelerator="cpu", devices=mesh.size())
        fabric.launch()
        error = error_of(lambda: fabric.setup(model))
        dict(train(model, optimizers(model, "loop"), device, 1, 1, None, False))
        fabric.strategy.teardown()
    return error


def refused_on_another_device() -> str:
    begin(True)
    model = made("in blocks", init_device_mesh("cpu", (dist.get_world_size(),)))
    return error_of(lambda: sp_lightning.stream(model, "simgpu:0"))


def misused(how: str) -> str:
    """Return the error of a use that streamed DTensors do not have."""
    mesh, _, device = begin(False)
    model = made("in sequence", mesh)
    words = torch.arange(24).view(3, 8)
    weight: Any = list(model)[1].norm.weight
    if how == "hook from before":
        weight.register_post_accumulate_grad_hook(lambda p: None)

    def misuse() -> None:
        with sp_lightning.stream(model, device, window=1):
            if how == "hook":
                weight.register_hook(lambda grad: grad)
            elif how == "data":
                weight.data = weight * 2
            elif how == "apart":
                read = next(model.parameters()).square().sum()  # on the host, where the vocabulary is cut
                read.full_tensor().backward()  # type: ignore[attr-defined]
                model(words).sum().backward()
            elif how == "create_graph":
                model(words).sum().backward(create_graph=True)
            else:
                weight.grad = torch.zeros_like(weight)  # replicated, where a partial sum comes
                model(words).sum().backward()

    return error_of(misuse)


def marked() -> tuple[list[bool], str]:
    """Stream DTensors that were on the device, have attributes and are referred to weakly.

    Returns whether each is what it was, and the error of a backward through a graph from before.
    """
    _, mesh, device = begin(True)
    model = made("in sequence", mesh)
    for number, parameter in enumerate(model.parameters()):
        parameter.number = number  # type: ignore[attr-defined]
    known = list(map(weakref.ref, model.parameters()))
    before = model[1].norm.weight.sum()  # type: ignore[index, union-attr, operator]
    with sp_lightning.stream(model, device, window=1):
        found = [vars(p).get("number") == i and known[i]() is p for i, p in enumerate(model.parameters())]
        return found, error_of(before.backward)  # type: ignore[operator]


def asked_for(streams: bool) -> list[Tensor]:
    """Return the gradients that `torch.autograd.grad` finds."""
    mesh, _, device = begin(False)
    torch.manual_seed(0)
    model = made("in sequence", mesh)
    with sp_lightning.stream(model, device, window=1) if streams else contextlib.nullcontext():
        loss = model(torch.arange(24).view(3, 8)).square().sum()
        return [local(grad) for grad in torch.autograd.grad(loss, list(model.parameters()))]


def of_some(streams: bool) -> list[Tensor | None]:
    """Return the gradients that a backward of some weights brings."""
    mesh, _, device = begin(False)
    torch.manual_seed(0)
    model = made("in sequence", mesh)
    with sp_lightning.stream(model, device, window=1) if streams else contextlib.nullcontext():
        model(torch.arange(24).view(3, 8)).square().sum().backward(inputs=list(model.parameters())[:5])
        return [None if p.grad is None else local(p.grad) for p in model.parameters()]

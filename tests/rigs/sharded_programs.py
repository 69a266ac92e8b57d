"""Programs of users whose layers are cut among ranks, each made from a number, run plainly and streamed.

    python tests/rigs/sharded_programs.py FIRST LAST [--ranks 2] [--device simgpu]

prints each program that does not come out the same way, and a count of how they came out. On a simulated device nothing
draws at random or runs under autocast: the plain run is on the CPU, which does both in another way.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import io
import random
from typing import Any

import processes
import sharded
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import sp_lightning

HOST = torch.device("cpu")
FULL, LAX = StateDictOptions(full_state_dict=True), StateDictOptions(strict=False)
Dice = random.Random


# ---- models


class Block(nn.Module):
    """A layer with a branch, of one of several kinds."""

    def __init__(self, dice: Dice, width: int, kind: str) -> None:
        super().__init__()
        bias, hidden = dice.random() < 0.7, dice.choice([8, 12, 16, 18])
        self.kind, self.stops = kind, dice.random() < 0.15
        self.norm: nn.Module = nn.LayerNorm(width, bias=dice.random() < 0.5)
        if kind == "rms" or dice.random() < 0.3:
            self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if kind == "gated" else None
        self.low = nn.Sequential(nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False))
        if kind != "adapted":
            self.low = None  # type: ignore[assignment]
        else:
            self.up.requires_grad_(False)
            self.down.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(width)) if kind == "scaled" else None
        self.register_buffer("seen", torch.zeros(()) if kind == "counting" else None)
        self.dropout = nn.Dropout(0.25) if kind == "dropping" else None

    def _branch(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = F.gelu(self.up(y))
        if self.gate is not None:
            z = z * torch.sigmoid(self.gate(y))
        z = self.down(z)
        if self.low is not None:
            z = z + self.low(y)
        if self.scale is not None:
            z = z * self.scale
        if self.dropout is not None:
            z = self.dropout(z)
        if self.seen is not None and self.training:
            self.seen += 1
        return z

    def forward(self, x: Tensor) -> Tensor:
        if self.stops and self.training and torch.is_grad_enabled() and self.seen is None:
            return x + torch.utils.checkpoint.checkpoint(self._branch, x, use_reentrant=False)
        return x + self._branch(x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (part(normed).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, words: nn.Module, blocks: list[nn.Module], head: nn.Module, reads: int | None) -> None:
        super().__init__()
        self.words, self.blocks, self.head, self.reads = words, nn.ModuleList(blocks), head, reads
        self.skips: int | None = None
        self.twice: int | None = None

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for index, block in enumerate(self.blocks):
            if index != self.skips:
                x = block(x)
            if index == self.twice:
                x = block(x)
        y = self.head(x)
        if self.reads is not None:  # a weight outside of its unit
            weight: Any = next(self.blocks[self.reads].parameters())
            penalty = weight.square().mean()
            y = y + (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)
        return y  # type: ignore[no-any-return]


def make(dice: Dice, mesh: Any, draws: bool) -> tuple[Model, dict[str, Any]]:
    """Make a model, its layers cut in some way; return it with what a loop needs to know of it."""
    torch.manual_seed(dice.randrange(1000))
    width, size = dice.choice([8, 12, 16]), mesh.size()
    words = dice.choice([13, 16, 31])
    sequence = dice.random() < 0.4
    kinds = ["plain", "rms", "gated", "adapted", "scaled", "counting", "dropping", "attention"]
    if not draws:
        kinds.remove("dropping")
    if sequence:
        kinds = ["plain", "rms", "counting"]
    blocks: list[Any] = []
    for index in range(dice.choice([2, 3, 4])):
        kind = dice.choice(kinds if index else kinds[:3])
        blocks.append(Attention(width) if kind == "attention" and width % (2 * size) == 0 else Block(dice, width, kind))
    reads = dice.randrange(len(blocks)) if dice.random() < 0.15 else None
    model = Model(nn.Embedding(words, width), blocks, nn.Linear(width, words, bias=dice.random() < 0.5), reads)
    facts: dict[str, Any] = {"words": words, "long": 2 * size, "loss": "plain"}
    if sequence:
        cut_in_sequence(dice, model, mesh, facts)
    else:
        cut_by_blocks(dice, model, mesh)
    if dice.random() < 0.25 and type(model.words.weight) is type(model.head.weight):
        model.head.weight = model.words.weight
    for parameter in model.parameters():
        if dice.random() < 0.08:
            parameter.requires_grad_(False)
    if dice.random() < 0.1:
        model.twice = dice.randrange(len(blocks))
    return model, facts


def cut_in_sequence(dice: Dice, model: Model, mesh: Any, facts: dict[str, Any]) -> None:
    for block in model.blocks:
        plan: dict[str, Any] = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    output: dict[str, Any] = {"output_layouts": Replicate()}
    if dice.random() < 0.3:
        output, facts["loss"] = {"output_layouts": Shard(-1), "use_local_output": False}, "sharded"
    ends: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), **output),
    }
    parallelize_module(model, mesh, ends)


def cut_by_blocks(dice: Dice, model: Model, mesh: Any) -> None:
    for block in model.blocks:
        way = dice.choice(["columns", "columns", "columns", "whole", "up alone", "by hand"])
        if isinstance(block, Attention):
            columns: dict[str, Any] = dict.fromkeys("qkv", ColwiseParallel())
            if way != "whole":
                parallelize_module(block, mesh, columns | {"o": RowwiseParallel()})
        elif way == "columns":
            plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            if block.gate is not None:
                plan["gate"] = ColwiseParallel()
            parallelize_module(block, mesh, plan)
        elif way == "up alone":
            parallelize_module(block, mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
        elif way == "by hand" and block.gate is None:
            parallelize_module(
                block,
                mesh,
                {
                    "up": RowwiseParallel(input_layouts=Replicate()),
                    "down": ColwiseParallel(output_layouts=Replicate()),
                },
            )
    if dice.random() < 0.4:
        parallelize_module(model, mesh, {"words": RowwiseParallel(input_layouts=Replicate())})
    elif dice.random() < 0.2:
        parallelize_module(model, mesh, {"words": ColwiseParallel(output_layouts=Replicate())})
    if dice.random() < 0.4:
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def optimizers(dice: Dice, trained: list[Any]) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    kind = dice.randrange(7)
    if kind == 0:
        return [torch.optim.AdamW(trained, 1e-2, foreach=False)]
    if kind == 1:
        return [torch.optim.SGD(trained, 1e-1, momentum=0.9, nesterov=True)]
    if kind == 2 and len(trained) > 1:
        return [torch.optim.AdamW(trained[::2], 1e-2), torch.optim.SGD(trained[1::2], 0.1)]
    if kind == 3 and matrices and vectors:
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, 1e-2, amsgrad=True)]
    if kind == 4:
        return [torch.optim.Adagrad(trained, 0.1)]
    if kind == 5:
        return [torch.optim.RMSprop(trained, 1e-2, foreach=False)]
    return [torch.optim.AdamW(trained, 1e-2)]


# ---- what users do


def scale_gradient(dice: Dice, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and dice.random() < 0.5:
            parameter.grad.mul_(0.5)


def drop_gradient(dice: Dice, model: nn.Module) -> None:
    dice.choice(list(model.parameters())).grad = None


def replace_gradient(dice: Dice, model: nn.Module) -> None:
    parameter = dice.choice(list(model.parameters()))
    if parameter.grad is not None:
        parameter.grad = parameter.grad.clone() * 2


def clip_values(dice: Dice, model: nn.Module) -> None:
    for parameter in model.parameters():
        grad: Any = parameter.grad
        if grad is not None and not any(one.is_partial() for one in getattr(grad, "placements", ())):
            nn.utils.clip_grad_value_([parameter], 0.01)


def write(dice: Dice, model: nn.Module) -> None:
    dice.choice(list(model.parameters())).mul_(0.75)


def write_data(dice: Dice, model: nn.Module) -> None:
    dice.choice(list(model.parameters())).data.add_(0.0625)


def write_shard(dice: Dice, model: nn.Module) -> None:
    sharded.local(dice.choice(list(model.parameters()))).sub_(0.125)


def write_row(dice: Dice, model: nn.Module) -> None:
    dice.choice([p for p in model.parameters() if p.dim() == 1 or not isinstance(p, DTensor)])[0] = 0.25


def write_all(dice: Dice, model: nn.Module) -> None:
    torch._foreach_mul_([p for p in model.parameters() if isinstance(p, DTensor)] or list(model.parameters()), 0.875)


def start_anew(dice: Dice, model: nn.Module) -> None:
    torch.nn.init.normal_(dice.choice(list(model.parameters())), 0.0, 0.1)


def copy_from_whole(dice: Dice, model: nn.Module) -> None:
    parameter: Any = dice.choice(list(model.parameters()))
    if isinstance(parameter, DTensor):
        made = distribute_tensor(parameter.full_tensor() * 0.5, parameter.device_mesh, parameter.placements)
        parameter.copy_(made)


def load(dice: Dice, model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.125 for name, value in model.state_dict().items()})


def load_assigned(dice: Dice, model: nn.Module) -> None:
    copied = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: value * 0.5 if value.is_floating_point() else value for name, value in copied.items()})


def load_saved(dice: Dice, model: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))


def load_whole(dice: Dice, model: nn.Module) -> Any:
    found = get_model_state_dict(model, options=FULL)
    found = {name: value.clone() * 0.5 for name, value in found.items()}
    set_model_state_dict(model, found, options=FULL)
    return found


def freeze(dice: Dice, model: nn.Module) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    if len(trained) > 2:
        dice.choice(trained).requires_grad_(False)


def thaw(dice: Dice, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def whole_weight(dice: Dice, model: nn.Module) -> Any:
    parameter: Any = dice.choice(list(model.parameters()))
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def laid_out(dice: Dice, model: nn.Module) -> Any:
    parameter: Any = dice.choice(list(model.parameters()))
    return parameter.redistribute(placements=[Replicate()]) if isinstance(parameter, DTensor) else parameter


def norms(dice: Dice, model: nn.Module) -> Any:
    return {name: sharded.local(parameter.norm()) for name, parameter in model.named_parameters()}


def copied(dice: Dice, model: nn.Module) -> Any:
    return copy.deepcopy(dict(model.named_parameters()))


def apply(dice: Dice, model: nn.Module) -> None:
    model.apply(lambda part: part.reset_parameters() if isinstance(part, nn.LayerNorm) else None)  # type: ignore[func-returns-value]


BEFORE = [scale_gradient, drop_gradient, replace_gradient, clip_values]
BETWEEN = [write, write_data, write_shard, write_row, write_all, start_anew, copy_from_whole, load, load_assigned]
BETWEEN += [load_saved, load_whole, freeze, thaw, whole_weight, laid_out, norms, copied, apply]


# ---- programs


class Program:
    """One program; its dice fall in the same way in each of its runs."""

    def __init__(
        self, number: int, mesh: Any, device: torch.device, options: dict[str, Any] | None, draws: bool = True
    ) -> None:
        self.dice = Dice(f"sharded {number}")
        self.model, self.facts = make(self.dice, mesh, draws)
        self.between = BETWEEN if draws else [edit for edit in BETWEEN if edit is not start_anew]
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.device, self.options = device, options
        self.draw = torch.Generator().manual_seed(number)
        self.half = self.dice.random() < 0.2 and draws
        self.clips = self.dice.choice([None, None, 0.05, 0.5, 1e9])
        self.accumulates = self.dice.choice([1, 1, 2, 3])
        self.steps = self.dice.choice([2, 3, 4])
        self.sets_to_none = self.dice.random() < 0.8
        self.scheduled, self.averaged = self.dice.random() < 0.3, self.dice.random() < 0.3
        self.chosen = self.dice.randrange(1000)  # the optimizers
        self.resumes = self.dice.random() < 0.25
        self.swa = self.dice.random() < 0.1
        self.edits = self.dice.random() < 0.7
        self.skipping = self.dice.random() < 0.15
        self.closure = self.dice.random() < 0.1
        self.hook = self.dice.choice([None, None, None, "forward", "backward", "pre", "gathers", "after gradient"])
        self.found: dict[str, Any] = {}

    def note(self, name: str, value: Any) -> None:
        self.found.update(sharded.seen(name, value))

    def hooks(self) -> list[Any]:
        count = iter(range(10**6))
        block = self.dice.choice(list(self.model.blocks))

        def noting(kind: str, value: Any) -> None:
            if isinstance(value, Tensor):
                self.note(f"hook {kind} {next(count)}", sharded.local(value.detach()))

        if self.hook == "forward":
            return [block.register_forward_hook(lambda _, args, out: noting("forward", out))]
        if self.hook == "pre":
            return [block.register_forward_pre_hook(lambda _, args: noting("pre", args[0]))]
        if self.hook == "backward":
            return [block.register_full_backward_hook(lambda _, into, out: noting("backward", out[0]))]
        if self.hook == "gathers":

            def gather(part: nn.Module, args: Any, out: Any) -> None:
                for parameter in part.parameters():
                    noting("gathers", parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)

            return [block.register_forward_hook(gather)]
        if self.hook == "after gradient":
            plain = [p for p in self.model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
            return [p.register_post_accumulate_grad_hook(lambda p: noting("after", p.grad)) for p in plain[:1]]
        return []

    def loss(self, words: Tensor) -> Tensor:
        casts = (
            torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
            if self.half
            else contextlib.nullcontext()
        )
        with casts:
            out = self.model(words)
            return F.cross_entropy(out.flatten(0, 1), words.flatten())

    def batch(self) -> Tensor:
        shape = 2, self.facts["long"]
        return torch.randint(self.facts["words"], shape, generator=self.draw).to(self.device)

    def backward(self, name: str) -> Tensor:
        with loss_parallel() if self.facts["loss"] == "sharded" else contextlib.nullcontext():
            loss = self.loss(self.batch())
            loss.backward()  # type: ignore[no-untyped-call]
        self.note(f"{name} loss", sharded.local(loss.detach()))
        return loss

    def step(self, number: int, stepped_by: list[Any], averages: dict[str, Tensor] | None) -> None:
        dice, model = self.dice, self.model
        torch.manual_seed(number)
        if self.skipping:
            model.skips = dice.choice([None, 0, 1])
        for batch in range(self.accumulates):
            self.backward(f"{number}.{batch}")
        if self.clips is not None:
            by = dice.choice([None, False])
            for kind in (True, False):  # torch mixes none of them
                alike = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor) is kind]
                self.note(f"{number} norm {kind}", nn.utils.clip_grad_norm_(alike, self.clips, foreach=by))
        with torch.no_grad():
            if self.edits and dice.random() < 0.4:
                dice.choice(BEFORE)(dice, model)
        for name, parameter in model.named_parameters():
            self.note(f"{number} gradient of {name}", parameter.grad)
        for at, optimizer in enumerate(stepped_by):
            if self.closure:

                def closure(optimizer: Any = optimizer, at: int = at) -> Tensor:
                    optimizer.zero_grad()
                    return self.backward(f"{number} closure {at}")

                optimizer.step(closure)
            else:
                optimizer.step()
        for optimizer in stepped_by:
            optimizer.zero_grad(set_to_none=self.sets_to_none)
        with torch.no_grad():
            if self.edits and dice.random() < 0.7:
                edit = dice.choice(self.between)
                self.note(f"{number} {edit.__name__}", edit(dice, model))
            if averages is not None:
                for name, parameter in model.named_parameters():
                    averages[name].lerp_(parameter.detach(), 0.1)
        if dice.random() < 0.3:
            self.evaluate(number)
        if dice.random() < 0.2:
            self.state(number, stepped_by)
        for name, parameter in model.named_parameters():
            self.note(f"{number} {name}", parameter)

    def evaluate(self, number: int) -> None:
        self.model.eval()
        with torch.no_grad():
            loss = self.loss(self.batch()) if self.facts["loss"] == "plain" else self.model(self.batch())
            self.note(f"{number} evaluated", loss)
        self.model.train()

    def state(self, number: int, stepped_by: list[Any]) -> None:
        """Look at the optimizers' state, and load it."""
        if self.dice.random() < 0.5:
            found = get_optimizer_state_dict(self.model, stepped_by, options=LAX)
            self.note(f"{number} state", found["state"])
            set_optimizer_state_dict(self.model, stepped_by, found, options=LAX)
            return
        for optimizer in stepped_by:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file, weights_only=False))

    def run(self) -> dict[str, Any]:
        """Run the program, in two parts if it resumes."""
        hooks = self.hooks()
        kept: Any = None
        for part in range(1 + self.resumes):
            streamed: Any = contextlib.nullcontext()
            if self.options is not None and not (self.resumes and part == self.options.get("plain part")):
                options = {name: value for name, value in self.options.items() if name != "plain part"}
                streamed = sp_lightning.stream(self.model, self.device, **options)
            with streamed:
                stepped_by = optimizers(Dice(self.chosen), self.trained)
                if kept is not None:
                    self.model.load_state_dict(kept[0])
                    for optimizer, state in zip(stepped_by, kept[1], strict=True):
                        optimizer.load_state_dict(state)
                schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in stepped_by * self.scheduled]
                averages = None
                if self.averaged:
                    averages = {name: p.detach().clone() for name, p in self.model.named_parameters()}
                averaged = torch.optim.swa_utils.AveragedModel(self.model) if self.swa else None
                for number in range(self.steps):
                    self.step(10 * part + number, stepped_by, averages)
                    for scheduler in schedulers:
                        scheduler.step()
                    if averaged is not None:
                        averaged.update_parameters(self.model)
                names = {parameter: name for name, parameter in self.model.named_parameters()}
                for at, optimizer in enumerate(stepped_by):
                    for parameter, state in optimizer.state.items():
                        self.note(f"{part} state {at} of {names.get(parameter)}", dict(state))
                self.note(f"{part} averages", averages or {})
                if averaged is not None:
                    self.note(f"{part} averaged", dict(averaged.named_parameters()))
                self.note(f"{part} state_dict", dict(self.model.state_dict()))
                kept = copy.deepcopy((self.model.state_dict(), [one.state_dict() for one in stepped_by]))
                for optimizer in stepped_by:
                    optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
        self.note("after", dict(self.model.state_dict()))
        return self.found


def options_of(number: int) -> dict[str, Any]:
    dice = Dice(f"options {number}")
    found: dict[str, Any] = {"window": dice.choice([1, 1, 2, 3, 9])}
    found["activations"] = dice.choice(["keep", "recompute", "offload", "recompute+offload"])
    if found["window"] > 1 and dice.random() < 0.3:
        found["transfer"] = 2
    if dice.random() < 0.2:
        found["host_memory"] = "pageable"
    if dice.random() < 0.2:
        found["units"] = ("Linear",)
    if dice.random() < 0.2:
        found["units"] = ("Block",)
    found["plain part"] = dice.choice([None, 0, 1])
    return found


def outcome(number: int, simulated: bool) -> tuple[str, str]:
    """Run a program plainly and streamed on this rank; return how it came out."""
    theirs, ours, device = sharded.begin(simulated)
    options = options_of(number)
    if simulated:
        options["plain part"] = None
    try:
        expected = Program(number, theirs, HOST, None, not simulated).run()
    except Exception as error:
        return "tells nothing", f"{type(error).__name__}: {error}"[:200]
    try:
        found = Program(number, ours, device, options, not simulated).run()
    except sp_lightning.errors.SuperpipelineError as error:
        return "refused", f"{options} {type(error).__name__}: {error}"[:400]
    names = sharded.difference(expected, found)
    return ("differs", f"{options} {names[:8]} of {len(expected)}") if names else ("equal", "")


def two_programs() -> tuple[list[str], list[str]]:
    """Return what differs between a program and itself, and between it and one whose batches are others."""
    mesh, _, device = sharded.begin(False)
    one, same, other = (Program(1, mesh, device, None) for _ in range(3))
    other.draw.manual_seed(2)
    expected = one.run()
    return sharded.difference(expected, same.run()), sharded.difference(expected, other.run())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    run = functools.partial(processes.run, given.ranks, outcome, simulated=given.device == "simgpu", timeout=60)
    for number in range(given.first, given.last):
        try:
            found = run(number)
        except processes.RankFailed as error:
            found = [("fails", str(error)[-1500:])]
            processes.close_all()
        counts[found[0][0]] += 1
        if wrong := [one for one in found if one[0] != "equal"]:
            print(number, *wrong[0], flush=True)
    print(dict(counts), flush=True)


if __name__ == "__main__":
    main()

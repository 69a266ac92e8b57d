"""One module and one optimizer that go through many streamings, with other options each time, beside a plain twin.

1. A history is made from a number: moves of a user (forward and backward, steps, clipping, edits of weights, gradients
   and optimizer, copies, checkpoints), among which streaming begins with random options, and ends.
2. The twin does the same, on the device that computes while the module is streamed, and on the host otherwise. Where
   optimizers step on the device, its optimizer does.
3. After most moves, and at the end, both have the same bits: weights, gradients, buffers and optimizer state.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sp_lightning
from sp_lightning.errors import ExactnessError

WIDTH, TOKENS = 8, 17
KINDS = ("plain", "batch norm", "recurrent", "parameter", "shared")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


class Block(nn.Module):
    """Two layers beside what goes past them, and one thing more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if kind == "recurrent":
            self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if kind == "parameter":
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))
        if kind == "shared":
            self.again = self.down

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.flatten(0, 1)).view_as(x) if self.kind == "batch norm" else self.norm(x)
        y = self.rnn(y)[0] if self.kind == "recurrent" else y
        y = self.down(nn.functional.gelu(self.up(y)))
        y = y * self.scale if self.kind == "parameter" else y
        return x + (y + self.again(torch.tanh(self.up(x))) if self.kind == "shared" else y)


class Net(nn.Module):
    """Some blocks between a table and a head, which may be one weight; blocks may be left out."""

    def __init__(self, kinds: list[str], tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.blocks = nn.ModuleList(map(Block, kinds))
        if tied:
            self.head.weight = self.table.weight
        self.left_out: set[int] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for index, block in enumerate(self.blocks):
            x = x if index in self.left_out else block(x)
        return self.head(x)


class Side:
    """The module, or its twin, with its optimizer; and where it computes now, and steps."""

    def __init__(self, net: Net, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer
        self.computes_on = self.steps_on = torch.device("cpu")

    def parameter(self, which: int) -> nn.Parameter:
        parameters = list(self.net.parameters())
        return parameters[which % len(parameters)]

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Any:
        """The place where the side's bytes are: a streamed module's are found by themselves."""
        yield

    def tokens(self, seed: int) -> Tensor:
        return torch.randint(TOKENS, (2, 5), generator=torch.Generator().manual_seed(seed)).to(self.computes_on)


class Twin(Side):
    """A plain side, which goes where it computes or steps, and comes back."""

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Any:
        self._move(device)
        yield
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        self.net.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim():
                    state[name] = value.to(device)


class Draw:
    """What a move draws: the same for both sides."""

    def __init__(self, numbers: random.Random) -> None:
        self.part, self.which, self.seed = numbers.random(), numbers.randrange(1000), numbers.randrange(10**6)


def backward(side: Side, draw: Draw, how: str) -> None:
    cast = draw.part > 0.6 and next(side.net.parameters()).dtype is torch.float32
    tokens, trained = side.tokens(draw.seed), [p for p in side.net.parameters() if p.requires_grad]
    with torch.autocast(side.computes_on.type, torch.bfloat16, enabled=cast, cache_enabled=False):
        loss = side.net(tokens).float().square().mean()
        if how == "twice":
            loss = loss + side.net(tokens.flip(0)).float().mean()
    if how == "some" and trained[::2]:
        loss.backward(inputs=trained[::2])
    elif how == "grad" and trained:
        torch.autograd.grad(loss, trained, allow_unused=True)
    elif loss.requires_grad:
        loss.backward(retain_graph=how == "again")
        if how == "again":
            loss.backward()


def edit_weight(side: Side, draw: Draw) -> None:
    p = side.parameter(draw.which)
    if draw.part < 0.3:
        p.data.mul_(0.9)
    elif draw.part < 0.6:
        p.data = p.data.clone() * 1.1
    else:
        with torch.no_grad():
            p.add_(0.01)


def edit_gradient(side: Side, draw: Draw) -> None:
    p = side.parameter(draw.which)
    if p.grad is not None and draw.part < 0.4:
        p.grad.mul_(0.5)
    elif p.grad is not None:
        p.grad = p.grad.clone() + 1e-3 if draw.part < 0.7 else None


def freeze(side: Side, draw: Draw) -> None:
    p = side.parameter(draw.which)
    p.requires_grad_(not p.requires_grad)


def load(side: Side, draw: Draw) -> None:
    if draw.part < 0.5:
        side.net.load_state_dict({name: value.clone() for name, value in side.net.state_dict().items()})
    else:
        side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


def exchange(side: Side, draw: Draw) -> None:
    blocks, count = side.net.blocks, len(side.net.blocks)
    one, other = draw.which % count, draw.which // 7 % count
    blocks[one], blocks[other] = blocks[other], blocks[one]


def grow(side: Side, draw: Draw) -> None:
    if draw.part < 0.3:
        torch.manual_seed(draw.seed)
        side.net.blocks.append(Block("plain"))
        side.optimizer.add_param_group({"params": list(side.net.blocks[-1].parameters())})


def slow_down(side: Side, draw: Draw) -> None:
    for group in side.optimizer.param_groups:
        group["lr"] *= 0.7


def replace_optimizer(side: Side, draw: Draw) -> None:
    kinds = list(OPTIMIZERS.values())
    side.optimizer = kinds[draw.which % len(kinds)](side.net.parameters())


def leave_out(side: Side, draw: Draw) -> None:
    side.net.left_out ^= {draw.which % len(side.net.blocks)}


COMPUTES: dict[str, Callable[[Side, Draw], Any]] = {
    **{f"backward, {how}": lambda side, draw, how=how: backward(side, draw, how) for how in ("once", "twice", "again")},
    **{f"backward, {how}": lambda side, draw, how=how: backward(side, draw, how) for how in ("some", "grad")},
}
STEPS: dict[str, Callable[[Side, Draw], Any]] = {
    "step": lambda side, draw: side.optimizer.step(),
    "clip": lambda side, draw: nn.utils.clip_grad_norm_(side.net.parameters(), 0.1),
}
ELSE: dict[str, Callable[[Side, Draw], Any]] = {
    "zero": lambda side, draw: side.optimizer.zero_grad(set_to_none=draw.part < 0.6),
    "train or evaluate": lambda side, draw: side.net.train(draw.part < 0.6),
    **{one.__name__: one for one in (edit_weight, edit_gradient, freeze, load, exchange, grow, slow_down)},
    **{one.__name__: one for one in (replace_optimizer, leave_out)},
}
MOVES = ["open"] * 3 + ["close", "copy"] + [*COMPUTES] * 2 + ["backward, once"] * 4 + [*STEPS] * 3 + [*ELSE]


def options(numbers: random.Random, device: torch.device, folder: str) -> dict[str, Any]:
    """Options of a streaming."""
    chosen: dict[str, Any] = {"window": numbers.choice([1, 2, 50])}
    chosen["activations"] = numbers.choice(["keep", "recompute", "offload", "recompute+offload"])
    if numbers.random() < 0.3:
        chosen["optimizer_overlap"] = False
    if numbers.random() < 0.35:
        chosen |= {"disk": folder, "host_budget": "0B"}
    elif device.type != "cpu" and numbers.random() < 0.3:
        chosen["optimizer_device"] = "device"
    return chosen


def difference(one: Side, other: Side) -> str:
    """What differs between two sides; nothing if no bit does."""
    for (name, p), q in zip(one.net.named_parameters(), other.net.parameters(), strict=True):
        state, expected = one.optimizer.state.get(p, {}), other.optimizer.state.get(q, {})
        found = {"weight": (p.data, q.data), "gradient": (p.grad, q.grad), "keys": (sorted(state), sorted(expected))}
        found |= {key: (state[key], expected[key]) for key in state.keys() & expected.keys()}
        if differing := [what for what, values in found.items() if not same(*values)]:
            return f"{differing[0]} of {name}"
    for (name, value), expected in zip(one.net.named_buffers(), other.net.buffers(), strict=True):
        if not same(value, expected):
            return f"buffer {name}"
    return ""


def same(one: Any, other: Any) -> bool:
    if not (torch.is_tensor(one) and torch.is_tensor(other)):
        return bool(one is other or one == other)
    one, other = one.detach().cpu().contiguous(), other.detach().cpu().contiguous()
    return one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def play(number: int, device: torch.device, folder: str, spoil: Callable[[Side], None] | None = None) -> list[str]:
    """Play the history of this number; return its moves, and then what differs, if anything does.

    ``spoil`` changes the module after the last move.
    """
    numbers = random.Random(number)
    torch.manual_seed(number)
    net = Net(numbers.choices(KINDS, k=numbers.randint(2, 5)), numbers.random() < 0.4)
    make = OPTIMIZERS[numbers.choice(list(OPTIMIZERS))]
    twin_net = copy.deepcopy(net)
    ours, twin = Side(net, make(net.parameters())), Twin(twin_net, make(twin_net.parameters()))
    moves, host = [], torch.device("cpu")
    with contextlib.ExitStack() as streaming:
        for _ in range(numbers.randint(15, 40)):
            move, draw = numbers.choice(MOVES), Draw(numbers)
            moves.append(move)
            if move in ("open", "close") or (move == "copy" and draw.part < 0.3):
                streaming.close()
                ours.computes_on = ours.steps_on = twin.computes_on = twin.steps_on = host
            if move == "open":
                chosen = options(numbers, device, folder)
                moves[-1] += f" {chosen}"
                streaming.enter_context(sp_lightning.stream(ours.net, device, **chosen))
                ours.computes_on = twin.computes_on = device
                ours.steps_on = twin.steps_on = device if "optimizer_device" in chosen else host
            elif move == "copy" and ours.computes_on == host:
                for side in (ours, twin):
                    side.net, side.optimizer = copy.deepcopy((side.net, side.optimizer))
            elif move in COMPUTES:
                try:
                    COMPUTES[move](ours, draw)
                except ExactnessError:  # a run of a shared layer under autocast and one without, say
                    return moves
                with twin.on(twin.computes_on):
                    COMPUTES[move](twin, draw)
            elif move in STEPS:
                found = STEPS[move](ours, draw)
                with twin.on(twin.steps_on):
                    expected = STEPS[move](twin, draw)
                if not same(found, expected):
                    return [*moves, "norm"]
            elif move in ELSE:
                ELSE[move](ours, draw)
                ELSE[move](twin, draw)
            if numbers.random() < 0.6 and (found := difference(ours, twin)):
                return [*moves, found]
        if spoil is not None:
            spoil(ours)
        if found := difference(ours, twin):
            return [*moves, found]
    return [*moves, found] if (found := difference(ours, twin)) else moves

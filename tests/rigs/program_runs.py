"""A run of a random program: its model and optimizers, what its code does in each moment, and what it saw.

1. A run begins with a `Scene`, and with another one where it goes on from a checkpoint.
2. What was seen is in the order in which it was seen, but for what hooks in backward saw: their order is free.
3. An error ends a batch, or a Trainer's fit; the run notes its type, drops gradients and goes on, as users do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from program_edits import EDITS, ON_LOSS, Scene, over
from program_nets import Net, batch
from torch import Tensor

import parity
from sp_lightning.errors import SuperpipelineError

if TYPE_CHECKING:
    from programs import Program

EARLY = ("start", "batch start")  # moments before a batch counts as begun


class ByStorage(torch.optim.Optimizer):
    """A user's own optimizer, whose writes no version counter sees."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    over(p.untyped_storage(), p).add_(p.grad, alpha=-group["lr"])
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01, foreach=False),
    "by storage": lambda p: ByStorage(p),
}
OTHER_KERNELS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {  # which ranks step in parts, too
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "momentum, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
}


class Run:
    """One run of a program on one device, plain or streamed.

    ``observes``: whether what the program's code sees is kept; without, it does all the same.
    """

    def __init__(
        self, program: Program, device: torch.device, streams: bool, observes: bool, folder: str, rank: int = 0
    ) -> None:
        self.program, self.device, self.streams, self.observes = program, device, streams, observes
        self.folder, self.rank = folder, rank
        self.begun = 0  # batches
        self.raised: list[Exception] = []  # what it caught
        self.figures: list[dict[str, Any]] = []  # of each leg that was streamed
        self._failed: set[int] = set()  # the acts that raised, which happen once
        self._seen: list[tuple[str, str, Any]] = []
        self.anchors: dict[str, Tensor] = {}  # by the names of weights
        self.scene = self._new_scene()

    @property
    def divides(self) -> bool:
        """Whether the streamed run divides the optimizers' state among nodes."""
        return bool(self.program.option.get("divide_state"))

    def _new_scene(self) -> Scene:
        torch.manual_seed(self.program.number)
        return Scene(Net(self.program.kinds), self.device)

    def begin_anew(self) -> None:
        """Go on with a new model (Rule 1)."""
        self._collect()
        self.scene.let_go()
        self.scene = self._new_scene()

    # ---- what the program does

    def fire(self, moment: str, by: str = "module") -> None:
        """Do what the program does in this moment."""
        step = self.begun if moment in EARLY else self.begun - 1
        self.scene.where = f"batch {step}, {moment}"
        for number, act in enumerate(self.program.acts):
            is_due = (act.step, act.moment, act.by) == (step, moment, by) and act.rank in (None, self.rank)
            if is_due and number not in self._failed:
                if act.edit == "fault":
                    self._failed.add(number)
                EDITS[act.edit].do(self.scene, act.at)

    def fires(self, moment: str, by: str) -> bool:
        """Whether the program does anything in this moment."""
        return any((act.moment, act.by) == (moment, by) for act in self.program.acts)

    def batch(self, epoch: int, index: int) -> Tensor:
        """Draw a batch of this rank's."""
        return batch(10 * epoch + index + 1000 * self.rank)

    def loss(self, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute a loss as the program does."""
        output = call(x).float()
        loss = output.square().mean() * 3 + output.sum() * 0.1
        kind = self.program.loss
        if kind == "of two calls":
            loss = loss + call(x * 0.5).float().square().mean()
        elif kind == "of weights too":
            loss = loss + 0.01 * sum(self.distance(name, p) for name, p in self.scene.net.named_parameters())
        elif kind == "of an input's gradient":
            inputs = x.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(call(inputs).float().sum(), inputs, create_graph=True)
            loss = loss + slope.square().mean()
        for term in self.scene.terms.values():
            loss = loss + term(x)
        if self.observes:
            self.scene.see("loss", loss)
        self.scene.loss = loss if self.program.does(*ON_LOSS) else None
        return loss

    def distance(self, name: str, weight: Tensor) -> Tensor:
        """Return the squared distance of a weight to its anchor, or to zero."""
        anchor = self.anchors.get(name)
        moved = weight if anchor is None or anchor.shape != weight.shape else weight - anchor
        return moved.float().square().sum()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Make the program's optimizers, and note anchors of its weights, every other one."""
        self.anchors = {name: p.detach() * 0.9 for name, p in list(self.scene.net.named_parameters())[::2]}
        weights, make = list(self.scene.net.parameters()), (OPTIMIZERS | OTHER_KERNELS)[self.program.optimizer]
        if self.program.groups == "two optimizers":
            made = [make(weights[::2]), OPTIMIZERS["momentum"](weights[1::2])]
        elif self.program.groups == "two groups":
            made = [make([{"params": weights[::2]}, {"params": weights[1::2], "lr": 0.02}])]
        else:
            made = [make(weights)]
        self.scene.optimizers = made
        return made

    def schedulers(self, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
        """Make the program's schedulers."""
        return [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers] if self.program.schedules else []

    def zero(self, optimizers: list[Any], moment: str) -> None:
        """Clear gradients if this is where the program does."""
        if self.program.zeroes == moment:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=self.program.sets_to_none)

    def first(self, index: int) -> bool:
        """Whether this batch is the first of those that accumulate."""
        return index % self.program.accumulates == 0

    def last(self, index: int) -> bool:
        """Whether this batch is the last of those that accumulate."""
        return (index + 1) % self.program.accumulates == 0

    def catch(self, error: Exception) -> None:
        """Note an error and go on (Rule 3)."""
        if isinstance(error, SuperpipelineError):
            raise error
        self.scene.where = f"batch {self.begun - 1}"
        self.scene.see("raised", type(error).__name__)
        self.raised.append(error.with_traceback(None))  # whose frames lead to a graph, and that to the error again
        for parameter in self.scene.net.parameters():
            parameter.grad = None

    # ---- what it saw

    def see_file(self, path: str) -> None:
        """Note what a checkpoint has, which the first rank writes, but for the paths and the times in it."""
        if self.observes and self.rank == 0:
            self._collect()
            found = torch.load(path, map_location="cpu", weights_only=False)
            left = ("callbacks", "loops")
            self._seen += [("checkpoint", key, value) for key, value in sorted(found.items()) if key not in left]

    def see_end(self) -> None:
        """Note all that the run left."""
        scene = self.scene
        scene.where = "end"
        scene.see("parameter", dict(scene.net.named_parameters()))
        scene.see("gradient", {name: p.grad for name, p in scene.net.named_parameters()})
        scene.see("buffer", dict(scene.net.named_buffers()))
        for number, optimizer in enumerate(() if self.divides else scene.optimizers):  # no node has the whole state
            scene.see(f"optimizer {number}", state_of(optimizer))
        scene.see("RNG state", parity.host_rng_states() | parity.device_rng_state(self.device))

    def record(self) -> parity.Record:
        """Return all that was seen; the telemetry has what was caught, and figures."""
        self._collect()
        entries = []
        for where, what, value in self._seen:
            for path, leaf in parity.leaves(value, ""):
                name = f"{what} {path}" if path else what
                entries.append(parity.Entry(where, name, leaf.cpu() if isinstance(leaf, Tensor) else leaf))
        raised = [f"{type(error).__name__}: {error}" for error in self.raised]
        return parity.Record(entries, {"raised": raised, "figures": self.figures})

    def _collect(self) -> None:
        """Take what was seen of the model so far (Rule 2)."""
        self._seen += [seen for seen in self.scene.seen if self.observes or seen[0] == "end"]
        for hook, values in sorted(self.scene.in_backward.items()):
            self._seen += [(where, f"{hook}, call {n}", value) for n, (where, value) in enumerate(values)]
        self.scene.seen, self.scene.in_backward = [], {}


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state by its parameters' places; the order in which it came into being does not count."""
    contents = optimizer.state_dict()
    state = {key: dict(sorted(value.items())) for key, value in sorted(contents["state"].items())}
    return {"state": state, "groups": contents["param_groups"]}

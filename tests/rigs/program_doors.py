"""How a random program is run, plainly or streamed: by hand, by Fabric, or by a Trainer of one of two libraries.

1. A run has legs: epochs, or a part of one. Where a program resumes, each leg begins with a new model and the
   checkpoint of the one before, and is plain or streamed. A Trainer's leg is a fit of its own, behind which the module
   is plain: no alias is kept over its end.
2. An error ends a batch, or a Trainer's fit; the run notes its type, drops gradients and goes on, as users do.
3. Of a LightningModule and a callback only those hooks are overridden in which the program does something: a strategy
   may keep to a slower order where code could look (parity.py, Rule 1).
4. A plain run computes on the same device. With several ranks it is a run under DDP.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import pretended_nodes
import torch
import torch.distributed as dist
from program_features import FEATURES, Scene, square
from program_nets import Net, batch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import parity
import sp_lightning
from sp_lightning.errors import SuperpipelineError

if TYPE_CHECKING:
    from programs import Program

HOOKS = {
    "start": "on_train_start",
    "batch start": "on_train_batch_start",
    "before backward": "on_before_backward",
    "after backward": "on_after_backward",
    "before step": "on_before_optimizer_step",
    "batch end": "on_train_batch_end",
    "epoch end": "on_train_epoch_end",
}
EARLY = ("start", "batch start")  # moments before a batch counts as begun
NORM, LIMIT = 0.3, 0.02  # to which gradients are clipped
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Own(torch.optim.Optimizer):
    """A user's own optimizer."""

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
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.5)
                    p.add_(mean, alpha=-group["lr"])
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
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=2),
    "own": Own,
}
OTHER_KERNELS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {  # which ranks step in parts, too
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "momentum, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
}


class Run:
    """One run of a program: its model and optimizers, what its code does in each moment, and what it saw.

    ``observes``: whether what code sees is kept.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        streams: bool,
        observes: bool = True,
        folder: str = ".",
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.program, self.device, self.streams, self.observes = program, device, streams, observes
        self.folder, self.rank, self.size = folder, rank, size
        self.begun = 0  # batches
        self.raised: list[Exception] = []
        self._failed: set[int] = set()  # acts that raised, which happen once
        self._seen: list[tuple[str, str, Any]] = []
        self.anchors: dict[str, Tensor] = {}  # by the names of weights
        self.scene = self._new_scene()

    def _new_scene(self) -> Scene:
        torch.manual_seed(self.program.number)
        net = Net(self.program.kinds)
        if self.program.compiled:
            net.blocks[0].compile(backend="eager")
        return Scene(net, self.device)

    def begin_anew(self) -> None:
        """Go on with a new model (Rule 1)."""
        self._collect()
        self.scene.let_go()
        self.scene = self._new_scene()

    @property
    def saved(self) -> str:
        return os.path.join(self.folder, "saved.ckpt")

    def legs(self) -> Iterator[tuple[int, int, bool, bool]]:
        """Yield each leg's first batch, the one behind its last, and whether it streams and resumes."""
        program = self.program
        ends = [program.batches * (epoch + 1) for epoch in range(program.epochs)]
        if program.door == "hf" and not program.resumes:
            ends = ends[-1:]
        if program.resumes_in_the_middle:
            ends.insert(0, 1)
        plain = {"plain first": [0], "plain last": [*range(1, len(ends))]}.get(str(program.resumes), [])
        for leg, end in enumerate(ends):
            resumes = bool(leg and program.resumes)
            if resumes:
                self.begin_anew()
            elif leg and program.has_trainer:
                for alias in ("view", "state", "gradient"):
                    self.scene.kept.pop(alias, None)
            yield ends[leg - 1] if leg else 0, end, self.streams and leg not in plain, resumes

    def options(self) -> dict[str, Any]:
        """The options of streaming; a group beside them where there are ranks."""
        options = dict(self.program.options)
        on_disk = {"disk": self.folder, "host_budget": "0B"} if options.pop("disk", False) else {}
        return options | on_disk

    # ---- what the program does

    def fire(self, moment: str, by: str = "module") -> None:
        """Do what the program does in this moment."""
        step = self.begun if moment in EARLY else self.begun - 1
        self.scene.where = f"batch {step}, {moment}"
        for number, act in enumerate(self.program.acts):
            is_due = (act.step, act.moment, act.by) == (step, moment, by)
            if is_due and number not in self._failed:
                if act.feature == "end: fault":
                    self._failed.add(number)
                FEATURES[act.feature].do(self.scene, act.at)

    def fires(self, moment: str, by: str) -> bool:
        return any((act.moment, act.by) == (moment, by) for act in self.program.acts)

    def batch(self, number: int) -> Tensor:
        """Draw a batch of this rank's."""
        epoch, index = divmod(number, self.program.batches)
        return batch(10 * epoch + index + 1000 * self.rank)

    def loss(self, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute a loss as the program does."""
        asks = self.program.does("backward: ", "fault: backward of the loss")
        last = self.scene.net.blocks[-1]
        handle = (
            last.register_forward_hook(lambda *found: setattr(self.scene, "activation", found[-1])) if asks else None
        )
        output = call(x).float()
        if handle is not None:
            handle.remove()
        loss = output.square().mean() * 3 + output.sum() * 0.1
        kind = self.program.loss
        if kind == "of two calls":
            loss = loss + square(call(x * 0.5))
        elif kind == "of weights too":
            loss = loss + 0.01 * sum(self._distance(name, p) for name, p in self.scene.net.named_parameters())
        elif kind == "of an input's gradient":
            inputs = x.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(call(inputs).float().sum(), inputs, create_graph=True)
            loss = loss + slope.square().mean()
        for term in self.scene.terms.values():
            loss = loss + term(x)
        if self.observes:
            self.scene.see("loss", loss)
        self.scene.loss = loss if asks else None
        return loss

    def _distance(self, name: str, weight: Tensor) -> Tensor:
        """The squared distance of a weight to its anchor, or to zero."""
        anchor = self.anchors.get(name)
        moved = weight if anchor is None or anchor.shape != weight.shape else weight - anchor
        return moved.float().square().sum()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Make the program's optimizers, and note anchors of its weights, every other one."""
        named = [
            (name, p) for name, p in self.scene.net.named_parameters() if any(p is one for one in self.scene.weights)
        ]
        self.anchors = {name: p.detach() * 0.9 for name, p in named[::2]}
        weights = [p for p in self.scene.net.parameters() if type(p).__name__ != "Coded"]
        make = (OPTIMIZERS | OTHER_KERNELS)[self.program.optimizer]
        if self.program.groups == "two optimizers":
            made = [make(weights[::2]), OPTIMIZERS["momentum"](weights[1::2])]
        elif self.program.groups == "two groups":
            made = [make([{"params": weights[::2]}, {"params": weights[1::2], "lr": 0.02}])]
        else:
            made = [make(weights)]
        self.scene.optimizers = made
        return made

    def schedulers(self, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
        return [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers] if self.program.schedules else []

    def scaler(self) -> Any:
        """A scaler of gradients, of which some overflow."""
        is_fp16 = self.program.precision == "16-mixed"
        return torch.amp.GradScaler(self.device.type, init_scale=2.0**16, growth_interval=2) if is_fp16 else None

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
        """Note an error and go on (Rule 2)."""
        if isinstance(error, SuperpipelineError):
            raise error
        self.scene.where = f"batch {self.begun - 1}"
        self.scene.see("raised", type(error).__name__)
        self.raised.append(error.with_traceback(None))  # whose frames lead to a graph, and that to the error again
        for parameter in self.scene.net.parameters():
            parameter.grad = None

    # ---- what it saw

    def see_file(self) -> None:
        """Note what a checkpoint has, which the first rank writes, but for the paths and the times in it."""
        if self.observes and self.rank == 0:
            self._collect()
            found = torch.load(self.saved, weights_only=False)
            left = ("callbacks", "loops")
            self._seen += [("checkpoint", key, value) for key, value in sorted(found.items()) if key not in left]

    def see_end(self) -> None:
        """Note all that the run left."""
        scene = self.scene
        scene.where = "end"
        scene.see("parameter", dict(scene.net.named_parameters()))
        scene.see("gradient", scene.gradients())
        scene.see("buffer", dict(scene.net.named_buffers()))
        for number, optimizer in enumerate(scene.optimizers):
            contents = optimizer.state_dict()  # the order in which state came into being does not count
            state = {key: dict(sorted(value.items())) for key, value in sorted(contents["state"].items())}
            scene.see(f"optimizer {number}", {"state": state, "groups": contents["param_groups"]})
        scene.see("RNG state", parity.host_rng_states() | parity.device_rng_state(self.device))

    def record(self) -> parity.Record:
        """Return all that was seen; the telemetry has what was caught."""
        self._collect()
        entries = []
        for where, what, value in self._seen:
            for path, leaf in parity.leaves(value, ""):
                name = f"{what} {path}" if path else what
                entries.append(parity.Entry(where, name, leaf))
        return parity.Record(entries, {"raised": [f"{type(error).__name__}: {error}" for error in self.raised]})

    def _collect(self) -> None:
        self._seen += [seen for seen in self.scene.seen if self.observes or seen[0] == "end"]
        for hook, values in sorted(self.scene.in_backward.items()) if self.observes else ():
            self._seen += [(where, f"{hook}, call {n}", value) for n, (where, value) in enumerate(values)]
        self.scene.seen, self.scene.in_backward = [], {}


# --- Loops: by hand, and with Fabric


class Loop:
    """A loop by hand, over `sp_lightning.stream` or under DDP; Fabric's differs in how it calls, saves and clips."""

    def __init__(self, run: Run, streams: bool, stack: contextlib.ExitStack) -> None:
        self.run, self.scaler = run, run.scaler()
        self.call = self.place(streams, stack)
        self.schedulers = run.schedulers(run.scene.optimizers)

    def place(self, streams: bool, stack: contextlib.ExitStack) -> Any:
        """Have the net where it computes, and make its optimizers; return what calls it."""
        run, call, self.no_sync = self.run, self.run.scene.net, contextlib.nullcontext
        if streams:
            group = {"group": dist.group.WORLD} if run.size > 1 else {}
            handle = ATTACH[run.program.door](call, run.device, **run.options(), **group)
            stack.callback(handle.close)
            self.no_sync = handle.no_sync if run.size > 1 else self.no_sync
        else:
            call.to(run.device)
            if run.size > 1:
                call = nn.parallel.DistributedDataParallel(call, find_unused_parameters=True)
                self.no_sync = call.no_sync
            if run.size > 2:
                call.register_comm_hook(None, sp_lightning.tree_hook)
        self.optimizers: list[Any] = run.optimizers()
        return torch.compile(call, backend="eager") if run.program.compiled == "the net" else call

    def autocast(self) -> Any:
        dtype = MIXED.get(self.run.program.precision)
        return torch.autocast(self.run.device.type, dtype, dtype is not None, cache_enabled=False)

    def accumulating(self, accumulates: bool) -> Any:
        return self.no_sync() if accumulates else contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip(self) -> None:
        for optimizer in self.optimizers if self.scaler is not None else ():
            self.scaler.unscale_(optimizer)
        weights = list(self.run.scene.net.parameters())
        if self.run.program.clips == "norm":
            self.run.scene.see("norm", nn.utils.clip_grad_norm_(weights, NORM))
        elif self.run.program.clips == "value":
            nn.utils.clip_grad_value_(weights, LIMIT)

    def step(self, optimizer: Any) -> None:
        optimizer.step() if self.scaler is None else self.scaler.step(optimizer)

    def parts(self) -> dict[str, Any]:
        named = {"optimizers": self.optimizers, "schedulers": self.schedulers}
        many = {f"{name} {number}": one for name, some in named.items() for number, one in enumerate(some)}
        return {"net": self.run.scene.net, **many} | ({"scaler": self.scaler} if self.scaler else {})

    def save(self) -> None:
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, self.run.saved)

    def load(self) -> None:
        states = torch.load(self.run.saved, map_location="cpu", weights_only=False)
        for name, part in self.parts().items():
            part.load_state_dict(states[name])

    def train_from(self, first: int, end: int) -> None:
        """Train with these batches, of one epoch."""
        run = self.run
        if first == 0:
            run.fire("start")
        for number in range(first, end):
            try:
                self.train(run.batch(number).to(run.device), number % run.program.batches)
            except Exception as error:
                run.catch(error)
            if run.program.validates and number % 2:
                self.evaluate("validation", batch(50 + number))
                run.fire("validation")
        if end % run.program.batches:
            return
        run.fire("epoch end")
        if run.program.predicts:
            self.evaluate("prediction", batch(70))

    def train(self, x: Tensor, index: int) -> None:
        """Train with a batch."""
        run = self.run
        run.fire("batch start")
        run.begun += 1
        if run.program.closure:
            self.optimizers[0].step(functools.partial(self.compute, x, index))
        else:
            self.compute(x, index)
        if run.last(index):
            for optimizer in self.optimizers if not run.program.closure else ():
                self.step(optimizer)
            if self.scaler is not None:
                self.scaler.update()
            run.fire("stepped")
            run.zero(self.optimizers, "after step")
            for scheduler in self.schedulers:
                scheduler.step()
        run.fire("batch end")

    def compute(self, x: Tensor, index: int) -> Tensor:
        """Compute the gradients of a batch."""
        run = self.run
        if run.first(index):
            run.zero(self.optimizers, "first")
        run.fire("forward")
        with self.accumulating(not run.last(index)):
            with self.autocast():
                loss = run.loss(x, self.call)
            run.fire("loss")
            if run.first(index):
                run.zero(self.optimizers, "before backward")
            run.fire("before backward")
            self.backward(loss / run.program.accumulates)
        run.fire("after backward")
        if run.last(index):
            run.fire("before step")
            self.clip()
        return loss

    def evaluate(self, what: str, x: Tensor) -> None:
        net = self.run.scene.net
        net.eval()
        try:
            with torch.no_grad(), self.autocast():
                self.run.scene.see(what, net(x.to(self.run.device)))
        except Exception as error:  # a fault in forward that came after the last batch
            self.run.catch(error)
        net.train()


class FabricLoop(Loop):
    """A loop with Fabric."""

    def place(self, streams: bool, stack: contextlib.ExitStack) -> Any:
        run = self.run
        self.fabric = fabric_of(run, streams)
        stack.callback(self.fabric.strategy.teardown)
        run.scene.module, *self.optimizers = self.fabric.setup(run.scene.net, *run.optimizers())
        self.scaler = None  # Fabric has its own
        return run.scene.module

    def autocast(self) -> Any:
        return contextlib.nullcontext()

    def accumulating(self, accumulates: bool) -> Any:
        return self.fabric.no_backward_sync(self.call, accumulates)

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def clip(self) -> None:
        how = {"norm": {"max_norm": NORM}, "value": {"clip_val": LIMIT}}.get(str(self.run.program.clips))
        for optimizer in self.optimizers if how else ():
            self.fabric.clip_gradients(self.call, optimizer, **how)

    def save(self) -> None:
        self.fabric.save(self.run.saved, super().parts() | {"net": self.call})

    def load(self) -> None:
        self.fabric.load(self.run.saved, super().parts() | {"net": self.call})


def by_loop(kind: type[Loop], run: Run) -> None:
    """Run a loop of this kind."""
    loop: Loop | None = None
    with contextlib.ExitStack() as stack:
        for first, end, streams, resumes in run.legs():
            if loop is None or resumes:
                loop = kind(run, streams, stack)
                if resumes:
                    loop.load()
            loop.train_from(first, end)
            if end == run.program.batches * run.program.epochs:
                run.see_end()
            elif run.program.resumes:
                loop.save()
                run.see_file()
                stack.close()


def fabric_of(run: Run, streams: bool) -> Any:
    """Make and launch a Fabric."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import MixedPrecision
    from lightning.fabric.strategies import SingleDeviceStrategy
    from ranked_fabric import TreeDDP

    if streams:
        strategy: Any = ATTACH[run.program.door](**run.options())
    else:
        strategy = SingleDeviceStrategy(device=run.device) if run.size == 1 else TreeDDP(find_unused_parameters=True)
    precision: Any = run.program.precision
    plugins = [MixedPrecision(precision, run.device.type, run.scaler())] if precision in MIXED else None
    nodes = pretended_nodes.count()
    devices: dict[str, Any] = {"devices": run.size // nodes, "num_nodes": nodes}
    fabric = Fabric(accelerator=accelerator(run.device), strategy=strategy, plugins=plugins, **devices)
    fabric.launch()
    return fabric


def accelerator(device: torch.device) -> Any:
    return importlib.import_module("simgpu.lightning").SimGPUAccelerator() if device.type == "simgpu" else device.type


# --- Lightning's Trainer


def package(door: str) -> Any:
    return importlib.import_module("pytorch_lightning" if door == "pytorch_lightning" else "lightning.pytorch")


def by_trainer(run: Run) -> None:
    """Run Trainers of either Lightning."""
    module = module_of(run)
    for _, end, streams, resumes in run.legs():
        if resumes:
            module = module_of(run)
        trainer = fit(run, module, end, streams, run.saved if resumes else None)
        if run.program.predicts and end % run.program.batches == 0:
            run.scene.where = f"up to batch {end}"
            try:
                run.scene.see(
                    "prediction", trainer.predict(module, DataLoader([batch(70)] * run.size, batch_size=None))
                )
            except Exception as error:  # a fault in forward that came after the last batch
                run.catch(error)
        trainer.save_checkpoint(run.saved)
        run.see_file()
        run.scene.optimizers = trainer.optimizers
    run.see_end()


def fit(run: Run, module: Any, end: int, streams: bool, saved: str | None) -> Any:
    """Fit a module up to a batch; return the Trainer that came there (Rule 2)."""
    while True:
        begin = run.begun
        trainer = trainer_of(run, end, streams, saved)
        # All ranks' batches, as Lightning's sampler deals them out.
        epoch, first = divmod(begin, run.program.batches)
        left = [batch(10 * epoch + first + number) for number in range(end - begin)]
        if run.size > 1:
            ranks = range(run.size)
            left = [batch(10 * epoch + index + 1000 * rank) for index in range(len(left)) for rank in ranks]
        loaders = [DataLoader(left, batch_size=None, shuffle=False)]
        if run.program.validates:
            loaders += [DataLoader([batch(50)] * run.size, batch_size=None, shuffle=False)]
        try:
            trainer.fit(module, *loaders, ckpt_path=saved)
            return trainer
        except Exception as error:
            run.catch(error)
            run.begun += run.begun == begin  # a fit that comes no further leaves its first batch to nobody
            if run.begun >= end:
                return trainer


def trainer_of(run: Run, end: int, streams: bool, saved: str | None) -> Any:
    """Make a Trainer."""
    program, lightning = run.program, package(run.program.door)
    if streams:
        strategy = ATTACH[run.program.door](**run.options())
    elif run.size == 1:
        strategy = lightning.strategies.SingleDeviceStrategy(device=run.device)
    else:
        strategy = importlib.import_module("ranked_runs").plain(run.size)
    clips = program.clips if not program.manual else None  # which a program does by itself
    mixed = importlib.import_module(f"{lightning.__name__}.plugins.precision").MixedPrecision
    is_fp16 = program.precision == "16-mixed"
    precision = {"plugins": mixed("16-mixed", run.device.type, run.scaler())} if is_fp16 else {}
    return lightning.Trainer(
        strategy=strategy,
        accelerator=accelerator(run.device),
        devices=run.size // pretended_nodes.count(),
        num_nodes=pretended_nodes.count(),
        **(precision or {"precision": program.precision}),
        max_epochs=-(-end // program.batches) if program.resumes else 1,
        accumulate_grad_batches=1 if program.manual else program.accumulates,
        gradient_clip_val={"norm": NORM, "value": LIMIT}.get(str(clips)),
        gradient_clip_algorithm=clips,
        val_check_interval=2 if program.validates and program.batches - run.begun % program.batches >= 2 else None,
        callbacks=[type("OfProgram", (lightning.Callback,), hooks_of(run, "callback"))()],
        default_root_dir=run.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def hooks_of(run: Run, by: str) -> dict[str, Any]:
    """Make the hooks in which a program does something (Rule 3)."""
    return {
        hook: lambda self, *args, moment=moment: run.fire(moment, by)
        for moment, hook in HOOKS.items()
        if run.fires(moment, by)
    }


def module_of(run: Run) -> Any:
    """Make the LightningModule of a program."""
    base = module_class(package(run.program.door).LightningModule)
    run.scene.module = type("Module", (base,), hooks_of(run, "module"))(run)
    return run.scene.module


@functools.cache
def module_class(base: Any) -> Any:
    class OfProgram(base):
        """Trains as its program says."""

        def __init__(self, run: Run) -> None:
            super().__init__()
            self.automatic_optimization = not run.program.manual
            self.net = run.scene.net
            self.of = [run]  # which is not a part of the module
            self.last_index = -1

        def training_step(self, x: Tensor, index: int) -> Tensor:
            (run,) = self.of
            run.begun += index != self.last_index  # an optimizer may call it several times
            self.last_index = index
            run.fire("forward")
            if run.program.alternates:
                return self.alternate(run, x)
            loss = run.loss(x, self.net)
            run.fire("loss")
            self.log("loss", loss.detach(), batch_size=1)
            if run.program.manual:
                self.step_by_hand(run, loss, index)
            return loss

        def step_by_hand(self, run: Run, loss: Tensor, index: int) -> None:
            optimizers = self.as_list(self.optimizers())
            if run.first(index):
                run.zero(optimizers, "first")
                run.zero(optimizers, "before backward")
            self.manual_backward(loss / run.program.accumulates)
            if run.last(index):
                for optimizer in optimizers:
                    if run.program.clips is not None:
                        limit = {"norm": NORM, "value": LIMIT}[run.program.clips]
                        self.clip_gradients(optimizer, limit, run.program.clips)
                    optimizer.step()
                run.fire("stepped")
                run.zero(optimizers, "after step")
                for scheduler in self.as_list(self.lr_schedulers() or []):
                    scheduler.step()

        def alternate(self, run: Run, x: Tensor) -> Tensor:
            """Train the weights of one optimizer after those of the other."""
            for optimizer in self.as_list(self.optimizers()):
                self.toggle_optimizer(optimizer)
                loss = run.loss(x, self.net)
                optimizer.zero_grad(set_to_none=run.program.sets_to_none)
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                run.fire("stepped")
            return loss

        @staticmethod
        def as_list(one: Any) -> list[Any]:
            return one if isinstance(one, list) else [one]

        def validation_step(self, x: Tensor, index: int) -> None:
            (run,) = self.of
            loss = square(self.net(x))
            run.scene.see("validation", loss)
            run.fire("validation")
            self.log("val_loss", loss, batch_size=1)

        def predict_step(self, x: Tensor, index: int) -> Tensor:
            return self.net(x)

        def configure_optimizers(self) -> Any:
            (run,) = self.of
            optimizers = run.optimizers()
            return optimizers, [{"scheduler": one, "interval": "step"} for one in run.schedulers(optimizers)]

    return OfProgram


# --- Hugging Face's Trainer


def by_hf(run: Run) -> None:
    """Run Trainers of transformers."""
    from accelerate.state import AcceleratorState, GradientState

    where = {"ACCELERATE_TORCH_DEVICE": str(run.device)} if run.device.type != "cpu" else {}
    for _, end, streams, resumes in run.legs():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, where))
            for name in (
                "transformers.training_args.is_torch_bf16_gpu_available",
                "accelerate.accelerator.is_bf16_available",
            ):
                stack.enter_context(mock.patch(name, lambda *_, **__: True))
            if streams:
                stack.enter_context(ATTACH[run.program.door](**run.options()))
            trainer = hf_trainer(run, end)
            trainer.train(resume_from_checkpoint=resumes)  # from the newest in its folder
            if run.program.predicts:
                found = trainer.predict([{"x": row} for row in batch(70)]).predictions
                run.scene.see("prediction", torch.as_tensor(found))
    run.see_end()


def hf_trainer(run: Run, end: int) -> Any:
    """Make a Trainer up to a batch: the loop is transformers', the loss and the moments are the program's."""
    import transformers

    program = run.program

    class Moments(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.fire("start")

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            run.fire("before step")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            run.fire("stepped")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.fire("batch end")

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.fire("epoch end")
            control.should_training_stop = run.begun >= end

    class OfProgram(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def create_optimizer(self, *_: Any) -> Any:
            if self.optimizer is None:
                (self.optimizer,) = run.optimizers()
            return self.optimizer

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            run.fire("batch start")
            run.begun += 1
            loss = super().training_step(*args, **kwargs)
            run.fire("after backward")
            return loss

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            run.fire("forward")
            loss = run.loss(inputs["x"], lambda x: model(x=x)["output"])
            run.fire("loss")
            return loss

    class OfNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.scene.net

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"output": self.net(x)}

    run.scene.module = OfNet()
    arguments = transformers.TrainingArguments(
        output_dir=run.folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=program.epochs,
        gradient_accumulation_steps=program.accumulates,
        max_grad_norm=NORM if program.clips else 0.0,
        lr_scheduler_type="cosine" if program.schedules else "constant",
        bf16=program.precision == "bf16-mixed",
        seed=1,
        logging_strategy="no",
        save_strategy="epoch" if program.resumes else "no",
        remove_unused_columns=False,
        label_names=[],
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"x": row} for number in range(program.batches) for row in run.batch(number)]
    trainer = OfProgram(model=run.scene.module, args=arguments, train_dataset=rows, callbacks=[Moments()])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


# --- The doors, and what streams at each


def hf_streaming(**options: Any) -> Any:
    from sp_lightning.hf import streaming

    return streaming(**options)


def pytorch_lightning_strategy(**options: Any) -> Any:
    return importlib.import_module("sp_lightning.pytorch_lightning").SuperpipelineStrategy(**options)


DOORS: dict[str, Callable[[Run], None]] = {
    "by hand": functools.partial(by_loop, Loop),
    "fabric": functools.partial(by_loop, FabricLoop),
    "trainer": by_trainer,
    "pytorch_lightning": by_trainer,
    "hf": by_hf,
}
ATTACH: dict[str, Callable[..., Any]] = {
    "by hand": sp_lightning.stream,
    "fabric": sp_lightning.SuperpipelineFabricStrategy,
    "trainer": sp_lightning.SuperpipelineStrategy,
    "pytorch_lightning": pytorch_lightning_strategy,
    "hf": hf_streaming,
}


def record(program: Program, device: torch.device, streams: bool, **rest: Any) -> parity.Record:
    """Run a program, plainly or streamed; return what it left and what its code saw."""
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(program, device, streams, folder=folder, **rest)
        torch.manual_seed(1)
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
        try:
            DOORS[program.door](run)
            found = run.record()
        finally:
            run.scene.let_go()
        if device.type != "cpu":
            torch.accelerator.synchronize()
            found.telemetry["peak"] = torch.accelerator.max_memory_allocated()
        if device.type == "simgpu":
            found.telemetry["races"] = importlib.import_module("simgpu").races()
        return found

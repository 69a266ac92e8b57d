"""How a random program is run: by a Trainer of either Lightning, by Fabric, or in a loop by hand; plainly, or streamed.

1. A run has a leg for each epoch, plain or streamed. Where a program resumes, a leg begins with a new model and the
   checkpoint of the one before.
2. After an error a loop goes on with its next batch; a Trainer's fit ends, and another one has the batches left.
3. Of a LightningModule and a callback only those hooks are overridden in which the program does something: a strategy
   keeps to a slower order where code could look (parity.py, Rule 1).
4. A plain run computes on the same device. With several ranks it is a run under DDP.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pretended_nodes
import torch
import torch.distributed as dist
from program_nets import batch
from program_runs import Run
from torch import Tensor, nn

import parity
import sp_lightning

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
NORM, LIMIT = 0.3, 0.02  # to which gradients are clipped


def run(
    program: Program, device: torch.device, streams: bool, observes: bool = True, rank: int = 0, size: int = 1
) -> parity.Record:
    """Run a program; return what it left and what its code saw."""
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = Run(program, device, streams, observes, folder, rank)
        torch.manual_seed(1)
        ENTRIES[program.entry](one, size)
        record = one.record()
        one.scene.let_go()
        return record


def legs(run: Run) -> list[bool]:
    """Return for each leg whether it is streamed (Rule 1)."""
    epochs = range(run.program.epochs)
    plain = {"plain first": epochs[:1], "plain last": epochs[1:]}.get(str(run.program.resumes), [])
    return [run.streams and epoch not in plain for epoch in epochs]


def options_of(run: Run) -> dict[str, Any]:
    """Return the options of streaming."""
    options = dict(run.program.options)
    on_disk = {"disk": run.folder, "host_budget": "0B"} if options.pop("disk", False) else {}
    return options | on_disk


# --- Loops: by hand, and with Fabric


class Loop:
    """What a loop of the user's own is made of: each entry has its own way to call, to differentiate and to clip."""

    def __init__(self, run: Run, call: Callable[[Tensor], Tensor], optimizers: list[Any]) -> None:
        self.run, self.call, self.optimizers = run, call, optimizers
        self.schedulers = run.schedulers(run.scene.optimizers)

    def autocast(self) -> Any:
        return contextlib.nullcontext()

    def accumulating(self, accumulates: bool) -> Any:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> None:
        weights = list(self.run.scene.net.parameters())
        if self.run.program.clips == "norm":
            self.run.scene.see("norm", nn.utils.clip_grad_norm_(weights, NORM))
        elif self.run.program.clips == "value":
            nn.utils.clip_grad_value_(weights, LIMIT)

    def epoch(self, epoch: int) -> None:
        """Train for an epoch."""
        run, net = self.run, self.run.scene.net
        if epoch == 0:
            run.fire("start")
        for index in range(run.program.batches):
            try:
                self.train(run.batch(epoch, index).to(run.device), index)
            except Exception as error:
                run.catch(error)
            if run.program.validates and index % 2:
                self.evaluate("validation", batch(50 + index))
                run.fire("validation")
        run.fire("epoch end")
        if run.program.predicts:
            self.evaluate("prediction", batch(70))
        assert net.training

    def train(self, x: Tensor, index: int) -> None:
        """Train with a batch."""
        run = self.run
        run.fire("batch start")
        run.begun += 1
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
            for optimizer in self.optimizers:
                optimizer.step()
            run.fire("stepped")
            run.zero(self.optimizers, "after step")
            for scheduler in self.schedulers:
                scheduler.step()
        run.fire("batch end")

    def evaluate(self, what: str, x: Tensor) -> None:
        net = self.run.scene.net
        net.eval()
        try:
            with torch.no_grad(), self.autocast():
                self.run.scene.see(what, net(x.to(self.run.device)))
        except Exception as error:  # a fault in forward that came after the last batch
            self.run.catch(error)
        net.train()


class LoopByHand(Loop):
    """A loop over `sp_lightning.stream`, or under DDP."""

    no_sync: Callable[[], Any] = contextlib.nullcontext

    def autocast(self) -> Any:
        mixed = self.run.program.precision == "bf16-mixed"
        return torch.autocast(self.run.device.type, torch.bfloat16, mixed, cache_enabled=False)

    def accumulating(self, accumulates: bool) -> Any:
        return self.no_sync() if accumulates else contextlib.nullcontext()

    def parts(self) -> dict[str, Any]:
        return {"net": self.run.scene.net, "optimizers": self.optimizers, "schedulers": self.schedulers}

    def save(self, path: str) -> None:
        states = {
            name: [one.state_dict() for one in part] if isinstance(part, list) else part.state_dict()
            for name, part in self.parts().items()
        }
        torch.save(states, path)

    def load(self, path: str) -> None:
        states = torch.load(path, map_location="cpu", weights_only=False)
        for name, part in self.parts().items():
            for one, state in (
                zip(part, states[name], strict=True) if isinstance(part, list) else [(part, states[name])]
            ):
                one.load_state_dict(state)


def by_hand(run: Run, size: int) -> None:
    """Run a loop by hand."""
    loop: LoopByHand | None = None
    saved = os.path.join(run.folder, "by hand.pt")
    with contextlib.ExitStack() as stack:
        for epoch, streams in enumerate(legs(run)):
            if loop is None:
                net: Any = run.scene.net
                call, no_sync = net, contextlib.nullcontext
                if streams:
                    group = {"group": dist.group.WORLD} if size > 1 else {}
                    handle = sp_lightning.stream(net, run.device, **options_of(run), **group)
                    stack.callback(handle.close)
                    stack.callback(lambda handle=handle: run.figures.append(handle.stats()))
                    no_sync = handle.no_sync
                else:
                    net.to(run.device)
                    if size > 1:
                        call = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
                        no_sync = call.no_sync
                    if size > 2:
                        call.register_comm_hook(None, sp_lightning.tree_hook)
                loop = LoopByHand(run, call, run.optimizers())
                loop.no_sync = no_sync
                if epoch:
                    loop.load(saved)
            loop.epoch(epoch)
            if epoch + 1 == run.program.epochs:
                run.see_end()
            elif run.program.resumes:
                loop.save(saved)
                run.see_file(saved)
                stack.close()
                loop = None
                run.begin_anew()


class FabricLoop(Loop):
    """A loop with Fabric."""

    fabric: Any

    def accumulating(self, accumulates: bool) -> Any:
        return self.fabric.no_backward_sync(self.call, accumulates)

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def clip(self) -> None:
        how = {"norm": {"max_norm": NORM}, "value": {"clip_val": LIMIT}}.get(str(self.run.program.clips))
        for optimizer in self.optimizers if how else ():
            self.fabric.clip_gradients(self.call, optimizer, **how)

    def parts(self) -> dict[str, Any]:
        return {"net": self.call, **{f"optimizer {number}": o for number, o in enumerate(self.optimizers)}}


def by_fabric(run: Run, size: int) -> None:
    """Run a loop with Fabric."""
    loop: FabricLoop | None = None
    saved = os.path.join(run.folder, "fabric.ckpt")
    with contextlib.ExitStack() as stack:
        for epoch, streams in enumerate(legs(run)):
            if loop is None:
                fabric = fabric_of(run, streams, size)
                stack.callback(fabric.strategy.teardown)
                if streams:
                    handles = fabric.strategy.handles
                    stack.callback(lambda handles=handles: run.figures.extend(one.stats() for one in handles))
                net, *optimizers = fabric.setup(run.scene.net, *run.optimizers())
                run.scene.module = net
                loop = FabricLoop(run, net, optimizers)
                loop.fabric = fabric
                if epoch:
                    fabric.load(saved, loop.parts())
            loop.epoch(epoch)
            if epoch + 1 == run.program.epochs:
                run.see_end()
            elif run.program.resumes:
                fabric.save(saved, loop.parts())
                run.see_file(saved)
                stack.close()
                loop = None
                run.begin_anew()


def fabric_of(run: Run, streams: bool, size: int) -> Any:
    """Make and launch a Fabric."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import MixedPrecision
    from lightning.fabric.strategies import SingleDeviceStrategy
    from ranked_fabric import TreeDDP

    accelerator: Any = run.device.type
    if run.device.type == "simgpu":
        accelerator = importlib.import_module("simgpu.lightning").SimGPUAccelerator()
    alone: dict[str, Any] = {"device": run.device} if size == 1 else {}
    if streams:
        strategy: Any = sp_lightning.SuperpipelineFabricStrategy(**alone, **options_of(run))
    else:
        strategy = SingleDeviceStrategy(**alone) if size == 1 else TreeDDP(find_unused_parameters=True)
    mixed = run.program.precision == "bf16-mixed"
    plugins = [MixedPrecision("bf16-mixed", run.device.type)] if mixed else None
    nodes = pretended_nodes.count()
    fabric = Fabric(accelerator=accelerator, devices=size // nodes, num_nodes=nodes, strategy=strategy, plugins=plugins)
    fabric.launch()
    return fabric


# --- Trainers


@functools.cache
def packages(entry: str) -> tuple[Any, Any]:
    """Return the package of a Lightning, and that of our strategies for it."""
    if entry == "pytorch_lightning":
        return importlib.import_module("pytorch_lightning"), importlib.import_module("sp_lightning.pytorch_lightning")
    return importlib.import_module("lightning.pytorch"), sp_lightning


def by_trainer(run: Run, size: int) -> None:
    """Run Trainers of either Lightning."""
    package, _ = packages(run.program.entry)
    saved = os.path.join(run.folder, "trainer.ckpt")
    module = module_of(package, run)
    for epoch, streams in enumerate(legs(run)):
        resumes = bool(epoch and run.program.resumes)
        if resumes:
            run.begin_anew()
            module = module_of(package, run)
        trainer = fit(package, run, module, epoch, streams, size, saved if resumes else None)
        if run.program.predicts:
            loader = torch.utils.data.DataLoader([batch(70)] * size, batch_size=None)
            run.scene.where = f"epoch {epoch}"
            try:
                run.scene.see("prediction", trainer.predict(module, loader))
            except Exception as error:  # a fault in forward that came after the last batch
                run.catch(error)
        trainer.save_checkpoint(saved, weights_only=run.divides)
        run.see_file(saved)
        run.scene.optimizers = trainer.optimizers
    run.see_end()


def fit(package: Any, run: Run, module: Any, epoch: int, streams: bool, size: int, saved: str | None) -> Any:
    """Fit a module for an epoch; return the Trainer that came to its end (Rule 2)."""
    end = run.begun + run.program.batches
    while True:
        begin = run.begun
        trainer = trainer_of(package, run, epoch, streams, size, saved)
        # All ranks' batches, as Lightning's sampler deals them out.
        left = [batch(10 * epoch + run.program.batches - end + number) for number in range(begin, end)]
        if size > 1:
            left = [batch(10 * epoch + index + 1000 * rank) for index in range(len(left)) for rank in range(size)]
        loaders = [torch.utils.data.DataLoader(left, batch_size=None, shuffle=False)]
        if run.program.validates:
            loaders += [torch.utils.data.DataLoader([batch(50)] * size, batch_size=None, shuffle=False)]
        try:
            trainer.fit(module, *loaders, ckpt_path=saved)
            return trainer
        except Exception as error:
            run.catch(error)
            run.begun += run.begun == begin  # a fit that comes no further leaves its first batch to nobody
            if run.begun >= end:
                return trainer
        finally:
            if (handle := getattr(trainer.strategy, "handle", None)) is not None:
                run.figures.append(handle.stats())


def trainer_of(package: Any, run: Run, epoch: int, streams: bool, size: int, saved: str | None) -> Any:
    """Make a Trainer."""
    program, device = run.program, run.device
    if device.type == "simgpu":
        importlib.import_module("simgpu.lightning")
    alone: dict[str, Any] = {"device": device} if size == 1 else {}
    if streams:
        strategy = packages(program.entry)[1].SuperpipelineStrategy(**alone, **options_of(run))
    elif size == 1:
        strategy = package.strategies.SingleDeviceStrategy(**alone)
    else:
        strategy = importlib.import_module("ranked_runs").plain(size)
    clips = program.clips if not program.manual else None  # which a program does by itself
    return package.Trainer(
        strategy=strategy,
        accelerator=device.type,
        devices=size // pretended_nodes.count(),
        num_nodes=pretended_nodes.count(),
        precision=program.precision,
        max_epochs=epoch + 1 if program.resumes else 1,
        accumulate_grad_batches=1 if program.manual else program.accumulates,
        gradient_clip_val={"norm": NORM, "value": LIMIT}.get(str(clips)),
        gradient_clip_algorithm=clips,
        val_check_interval=2 if program.validates and program.batches - run.begun % program.batches >= 2 else None,
        callbacks=[type("OfProgram", (package.Callback,), hooks_of(run, "callback"))()],
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


def module_of(package: Any, run: Run) -> Any:
    """Make the LightningModule of a program."""
    module = type("Module", (module_class(package.LightningModule),), hooks_of(run, "module"))(run)
    run.scene.module = module
    return module


@functools.cache
def module_class(base: Any) -> Any:
    class OfProgram(base):
        """Trains as its program says."""

        def __init__(self, run: Run) -> None:
            super().__init__()
            self.automatic_optimization = not run.program.manual
            self.net = run.scene.net
            self.of = [run]  # which is not a part of the module

        def training_step(self, x: Tensor, index: int) -> Tensor:
            (run,) = self.of
            run.begun += 1
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
            loss = self.net(x).float().square().mean()
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


ENTRIES: dict[str, Callable[[Run, int], None]] = {
    "lightning": by_trainer,
    "pytorch_lightning": by_trainer,
    "fabric": by_fabric,
    "by hand": by_hand,
}

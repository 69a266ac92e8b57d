"""The way of a training step through the library: the Python calls that it takes, and where they lead.

    print(step_trace.trace({"activations": "offload"}, "bf16-mixed"))      # in a process of its own: `sys.setprofile`

1. Only calls of the library's own functions count. Those of all threads do, so a step's calls differ a little from one
   run to the next; a figure is the least of the last steps, which are all alike.
2. Of the main thread also count its changes of file (a call in another file than the call before it), and its upward
   calls: direct ones from a file to one that imports it, itself or through others, wherever the import stands.
3. A step begins where Lightning begins its batch, and ends where the next one begins.
4. What the optimizer's thread has not reached by the end of backward is deferred, which takes more calls. How much that
   is depends on the machine, so backward pauses between blocks, where the thread catches up.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

import sp_lightning

ROOT = pathlib.Path(sp_lightning.__file__).parent
STEPS = 12
PAUSE_S = 0.01
ALIKE = 10  # of them, the last ones: the first learn the order of visits, and which units may be stepped in backward


class Way(NamedTuple):
    """The figures of a step."""

    calls: int
    changes: int
    upward: int


class Block(nn.Module):
    """Two layers around a nonlinearity, beside what goes past them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Pause(torch.autograd.Function):
    """Nothing, for which backward takes its time (Rule 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return grads[0]


class Net(L.LightningModule):
    """Four blocks, and a head that stays on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(64, 8)

    def training_step(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = Pause.apply(block(batch))
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=False)


class Counter(L.Callback):
    """The figures of each step of a run."""

    def __init__(self) -> None:
        self.steps: list[collections.Counter[str]] = []
        self._above = above(ROOT)
        self._main = threading.get_ident()
        self._last = ""
        self._now: collections.Counter[str] = collections.Counter()

    def on_train_batch_start(self, *_: Any) -> None:
        self._now = collections.Counter()
        self.steps.append(self._now)

    def on_train_end(self, *_: Any) -> None:
        self._now = collections.Counter()

    def count(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call, as a function for `sys.setprofile`."""
        path = frame.f_code.co_filename
        if event != "call" or path not in self._above:
            return
        self._now["calls"] += 1
        if threading.get_ident() == self._main:
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            self._now["upward"] += path in self._above.get(caller, ())
            self._now["changes"] += path != self._last
            self._last = path


def trace(options: Mapping[str, Any], precision: str | None = None) -> Way:
    """Train for a few steps with these options of the strategy, and return the figures of a step (Rule 1)."""
    counter = Counter()
    trainer = L.Trainer(
        strategy=sp_lightning.SuperpipelineStrategy(window=1, **options),
        accelerator="cpu",
        precision=precision,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counter],
    )
    data = torch.utils.data.DataLoader([torch.randn(4, 64) for _ in range(STEPS)], batch_size=None)
    threading.setprofile(counter.count)
    sys.setprofile(counter.count)
    try:
        trainer.fit(Net(), data)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    alike = counter.steps[-ALIKE:]
    return Way(*(min(step[name] for step in alike) for name in Way._fields))


def above(package: pathlib.Path) -> dict[str, set[str]]:
    """Find for each file of a package those that import it, themselves or through others (Rule 2)."""
    imported = {str(path): imports(path, package) for path in package.rglob("*.py")}
    for middle in imported:
        for upper, lower in imported.items():
            if middle in lower:
                imported[upper] = lower | imported[middle]
    return {path: {upper for upper, lower in imported.items() if path in lower and upper != path} for path in imported}


def imports(path: pathlib.Path, package: pathlib.Path) -> set[str]:
    """Find the files of the package that a file imports, wherever in it the import stands."""
    found: set[pathlib.Path] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            found.update(each.with_suffix(".py") for each in (base, *(base / name.name for name in node.names)))
    return {str(each) for each in found if each.is_file() and package in each.parents}

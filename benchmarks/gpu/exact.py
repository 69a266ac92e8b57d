"""Check on a real device that results equal the plain run's, to the last bit.

    python benchmarks/gpu/exact.py [--part zoo|blocks|compiled|optimizer|programs|repeat|plain] [--jobs 4]

- zoo: every net of tests/rigs/models.py and of tests/rigs/families.py, over a pairwise cover of precision, window and
  activations, against plain Lightning; optimizers step on the host.
- blocks: the same for a few blocks of real size.
- compiled: the same with blocks that are compiled in both runs.
- optimizer: all of these with optimizer_device="device", in kernels for lists and in fused ones, also clipped.
- programs: random programs of tests/rigs/programs.py, whose optimizer steps on the device in both runs.
- repeat: a model of 1B parameters, with optimizer overlap, for 200 steps twice, and with blocking launches: same bits.
- plain: the same model fully plain: same bits.
Kernels are deterministic throughout. The exit status is 1 if any bit differs; every cell is in the JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "rigs"))
if __name__ == "__main__":  # for this program and its processes alone: torch.autograd.forward_ad reads it late
    os.environ["PYTORCH_JIT"] = "0"  # scripted code is fused after some runs: then a plain run has other bits, too

import campaign
import families
import lightning as L
import programs
import shapes
import torch
from torch import nn

import models
import parity
from sp_lightning.errors import ExactnessError

PARTS = ("zoo", "blocks", "compiled", "optimizer", "programs", "repeat", "plain")
PLAIN_RUNS = 4  # that have to be equal for a difference to mean something
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
WINDOWS = (1, 2, 100)
ACTIVATIONS = ("keep", "recompute", "offload", "recompute+offload")
OPTIMIZERS = {  # of the part "optimizer"
    "optimizer": ("adamw", "sgd", "adagrad", "adafactor"),
    "implementation": ("loop", "foreach", "fused"),
    "clip": (None, ("norm", 0.1), ("value", 0.01)),
}
STEPS = 200
PROGRAMS = 5000  # numbers, from 0: more than a campaign has time for
# Edits that compute where a weight or a gradient is, which is another device.
ON_THE_HOST = ("see: item", "see: norm", "module: parametrize", "hook after accumulation: clips", "gradient: norms")
# Writes that autograd's versions do not see on CUDA, inside a forward: out of scope (docs/exactness.md).
UNSEEN = ("write: foreach", "inside: writes weights")


# ---- cells: one plain and one streamed run each


@dataclasses.dataclass(frozen=True)
class OfProgram:
    """A program to compare, made from its number."""

    part: str
    case: str
    number: int

    def run(self, device: str, small: bool) -> dict[str, Any]:
        """Compare it, in a process of the pool."""
        warnings.simplefilter("ignore")
        begin = time.perf_counter()
        with parity.deterministic_kernels(device):
            found = programs.outcome(programs.stepped_there(self.number), programs.runs_on(programs.prepare(device)))
        if found.kind not in ("equal", *programs.WRONG):  # discarded, or an error that the contract names
            end_after_an_error_of_the_device(found.what)
            return {"left_out": f"{self.case}: {found.kind} {found.what}"}
        difference = None if found.kind == "equal" else f"{found.kind} {found.what}"[:2000]
        end_after_an_error_of_the_device(difference)
        return {**dataclasses.asdict(self), "difference": difference, "seconds": time.perf_counter() - begin}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell to compare; the process that runs it looks up `case`."""

    part: str
    case: str
    precision: str
    window: int
    activations: str
    compiled: bool = False
    optimizer: str = "adamw"
    implementation: str = "loop"
    clip: tuple[str, float] | None = None

    def options(self) -> dict[str, Any]:
        where = "device" if self.part == "optimizer" else "host"
        return {"window": self.window, "activations": self.activations, "optimizer_device": where}

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `parity.check` that both runs share."""
        own = {} if self.implementation == "loop" else {self.implementation: True}
        if (self.optimizer, self.implementation) == ("adafactor", "fused"):
            own = {}  # which torch does not have
        kind = functools.partial(models.ZooModule, **own)
        return {"precision": self.precision, "optimizer": self.optimizer, "clip": self.clip, "kind": kind}

    def run(self, device: str, small: bool) -> dict[str, Any]:
        """Compare it, in a process of the pool."""
        warnings.simplefilter("ignore")
        case = cases(small)[self.case]
        if self.compiled:
            case = dataclasses.replace(case, make=functools.partial(compiled_blocks, case.make))
        begin, difference, counters = time.perf_counter(), None, {}
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                counters = parity.check(case, self.options(), accelerator=device, **self.settings())
        except parity.Difference as error:
            difference = str(error)
        except ExactnessError as error:  # an error that the contract names
            return {"left_out": f"{self.case}, {self.activations}: {error}"}
        except Exception as error:
            difference = f"{type(error).__name__}: {error}"[:2000]
            end_after_an_error_of_the_device(difference)
        if difference is not None and (reason := why_not_comparable(self, case, device)):
            return {"left_out": f"{self.case}, {self.precision}: plain Lightning {reason}"}
        counted = {name: counters.get(name) for name in ("fetches", "evictions", "units", "bytes_up", "bytes_down")}
        return {**dataclasses.asdict(self), "difference": difference, "seconds": time.perf_counter() - begin, **counted}


def llama_block(hidden: int, layers: int = 3) -> nn.Module:
    settings = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_hidden_layers": layers}
    settings |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256, "vocab_size": 32000}
    return models.transformer("LlamaForCausalLM", "LlamaConfig", **settings, use_cache=False)()


def vit_block(hidden: int) -> nn.Module:
    settings = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 3}
    settings |= {"num_attention_heads": hidden // 80, "image_size": 224, "patch_size": 14}
    return models.transformer("ViTForImageClassification", "ViTConfig", **settings)()


def long_text(index: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(32000, (2, 512), generator=models.generator(index))}


def large_picture(index: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 224, 224, generator=models.generator(index))}


def compiled_blocks(make: Any) -> nn.Module:
    net = make()
    for block in net.modules():
        if type(block).__name__ in ("LlamaDecoderLayer", "ViTLayer"):
            block.compile()
    return net


def cases(small: bool) -> dict[str, models.Case]:
    found = {**models.ZOO, **{f"family {name}": family.case for name, family in families.FAMILIES.items()}}
    sizes = (256, 160) if small else (2048, 1280)
    case = functools.partial(models.Case, loss=families.spread, predict=families.predictions)
    found["llama block"] = case("llama block", functools.partial(llama_block, sizes[0]), long_text)
    found["vit block"] = case("vit block", functools.partial(vit_block, sizes[1]), large_picture)
    return found


def is_comparable(number: int) -> bool:
    """Whether a program's writes are seen, and both runs compute all on the device: the host's kernels differ."""
    program = programs.stepped_there(number)
    return "optimizer_device" in program.option and not program.does(*ON_THE_HOST, *UNSEEN, "gradient: surgery")


def cells(part: str, small: bool) -> list[Cell] | list[OfProgram]:
    """List the cells, broad first: the first row of every case, then the second of every case, and so on."""
    if part == "programs":
        return [OfProgram(part, f"program {number}", number) for number in range(PROGRAMS) if is_comparable(number)]
    axes: dict[str, Any] = {"precision": PRECISIONS, "window": WINDOWS, "activations": ACTIVATIONS}
    rows = parity.pairwise(**axes, **(OPTIMIZERS if part == "optimizer" else {}))
    names = [name for name in cases(small) if part == "optimizer" or name.endswith(" block") == (part != "zoo")]
    compiled = part == "compiled"
    shifted = [[rows[(place + turn) % len(rows)] for turn in range(len(rows))] for place in range(len(names))]
    return [
        Cell(part, name, **own[turn], compiled=compiled)
        for turn in range(6 if part in ("blocks", "compiled") else len(rows))
        for name, own in zip(names, shifted, strict=True)
    ]


def end_after_an_error_of_the_device(difference: str | None) -> None:
    """End this process of the pool where nothing works in it any more."""
    if difference is not None and "CUDA error" in difference:
        os.write(2, f"{difference}\n".encode())
        os._exit(70)


def end_when_asked() -> None:
    """Have this process of the pool end when it is asked to: Lightning ignores it where nobody else listens."""
    faulthandler.enable()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(70))


def why_not_comparable(cell: Cell, case: models.Case, device: str) -> str | None:
    """Say why plain Lightning itself does not give the same bits each time, as with some kernels; None if it does."""
    settings = cell.settings()
    make = functools.partial(settings.pop("kind"), case, optimizer=settings.pop("optimizer"))
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            runs = [
                parity.record(make, parity.plain_strategy(device), accelerator=device, **settings)
                for _ in range(PLAIN_RUNS)
            ]
        for other in runs[1:]:
            parity.compare(runs[0], other)
    except parity.Difference:
        return "does not repeat itself"
    except Exception as error:
        return f"does not run it: {type(error).__name__}: {error}"[:2000]
    return None


def compare_cells(part: str, run: campaign.Campaign, jobs: int) -> None:
    """Compare the cells of a part, several at a time in processes of a pool, until the time is over."""
    waiting = iter(cells(part, run.small))
    while run.left_s > 0:
        lost = rounds(run, waiting, jobs)
        if not lost:
            return
        for cell in lost:  # one of these cells ended its process
            run.add({**dataclasses.asdict(cell), "difference": "the process ended", "seconds": 0.0})


def rounds(run: campaign.Campaign, waiting: Iterator[Cell | OfProgram], jobs: int) -> list[Cell | OfProgram]:
    """Run cells until none is left; if a process ends, return the cells that were running."""
    under_way: dict[Any, Cell | OfProgram] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=end_when_asked) as pool:
        try:
            while True:
                for cell in itertools.islice(waiting, jobs - len(under_way) if run.left_s > 0 else 0):
                    under_way[pool.submit(cell.run, run.device, run.small)] = cell
                if not under_way:
                    return []
                for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                    result = done.result()
                    del under_way[done]
                    if "left_out" in result:
                        run.say(f"left out {result['left_out']}")
                        continue
                    run.add(result)
                    if result["difference"]:
                        run.say(f"DIFFERS {result}")
        except BrokenProcessPool:
            return list(under_way.values())


# ---- whole runs


class Language(L.LightningModule):
    """A Llama of `bench/shapes.py`, trained on random tokens."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        self.size = ("llama-tiny", 1, 64) if small else ("llama-1b", 1, 512)
        self.net = shapes.build(self.size[0])
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        batches = [shapes.inputs(*self.size, generator) for _ in range(STEPS)]
        return torch.utils.data.DataLoader(batches, batch_size=None)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.net(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def whole_run(device: str, small: bool, plain: bool, steps: int) -> dict[str, Any]:
    """Train for these steps, and return the losses and a digest of all weights."""
    warnings.simplefilter("ignore")
    L.seed_everything(0, verbose=False)
    strategy = "auto" if plain else parity.streaming_strategy(device, window=3)
    with parity.deterministic_kernels(device):
        module = Language(small)
        trainer = L.Trainer(
            accelerator=device, devices=1, strategy=strategy, precision="bf16-mixed", max_steps=steps, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module)
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return {"losses": [loss.item() for loss in module.losses], "weights": digest.hexdigest()}


def in_a_process(run: campaign.Campaign, plain: bool, steps: int, **environment: str) -> dict[str, Any]:
    """Run `whole_run` in a process of its own."""
    order = {"device": run.device, "small": run.small, "plain": plain, "steps": steps}
    return {"losses": [], "weights": "", **run.in_a_process(__file__, "--whole-run", order, **environment)}


def repeat(run: campaign.Campaign) -> None:
    """Repeat a run, and run it with blocking launches."""
    steps = 20 if run.small else STEPS
    first, second = in_a_process(run, False, steps), in_a_process(run, False, steps)
    run.add({"part": "repeat", "case": f"{steps} steps twice", "difference": unequal(first, second), "losses": first})
    steps //= 4
    blocking = in_a_process(run, False, steps, CUDA_LAUNCH_BLOCKING="1")
    short = in_a_process(run, False, steps)
    run.add({"part": "repeat", "case": f"{steps} steps, blocking", "difference": unequal(short, blocking)})


def unequal(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    if error := one.get("error") or other.get("error"):
        return error
    if one["losses"] != other["losses"]:
        step = next(i for i, (a, b) in enumerate(zip(one["losses"], other["losses"], strict=True)) if a != b)
        return f"loss of step {step}: {one['losses'][step]!r} != {other['losses'][step]!r}"
    return None if one["weights"] == other["weights"] else "weights differ after equal losses"


def beside_plain(run: campaign.Campaign) -> None:
    """Compare a whole run with a plain one."""
    steps = 20 if run.small else STEPS
    plain, ours = in_a_process(run, True, steps), in_a_process(run, False, steps)
    run.add({"part": "plain", "case": f"{steps} steps, plain", "difference": unequal(plain, ours), "losses": plain})


def main() -> int:
    parser = campaign.parser(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="part, may be repeated (default: all)")
    parser.add_argument("--jobs", type=int, default=4, help="cells at a time (default: 4)")
    parser.add_argument("--whole-run", help="used by the campaign itself")
    options = parser.parse_args()
    if options.whole_run:
        sys.stdout.write(json.dumps(whole_run(**json.loads(options.whole_run))) + "\n")
        return 0
    run = campaign.Campaign("exact", options)
    for part in options.part or PARTS:
        if run.left_s <= 0:
            run.say(f"{part}: not begun: no time left")
        elif part in ("repeat", "plain"):
            try:
                (repeat if part == "repeat" else beside_plain)(run)
            except subprocess.TimeoutExpired:
                run.say(f"{part}: ended: no time left")
        else:
            compare_cells(part, run, options.jobs)
    for part in options.part or PARTS:
        own = [result for result in run.results if result["part"] == part]
        differing = [result for result in own if result["difference"]]
        run.say(f"{part:10} {len(own):4} compared, {len(differing)} differ")
        run.say(*(f"    {result['case']}: {result['difference']}"[:300] for result in differing))
    return 1 if any(result["difference"] for result in run.results) else 0


if __name__ == "__main__":
    sys.exit(main())

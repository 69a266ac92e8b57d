"""Report on this machine's card in five minutes: is it exact, how fast is it, what does a clipped step take?

    python benchmarks/report_card.py [--device cuda] [--json report_card.json]

For any CUDA or ROCm card of 8 GB or more, under WSL2 too. It prints a table, and writes a JSON file for the issue form
"A report on a card". `--tiny` runs all of it in small, also with `--device cpu`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_lightning

GIB = 2**30
SECONDS = 2.0  # of each rate
STEPS = 5  # of the clipped run, of which the first two make state and take memory
VOCABULARY = 4096


class Block(nn.Module):
    """A causal transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        parts = self.qkv(self.before(x)).view(rows, tokens, 3, self.heads, -1).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """A language model of such blocks; returns its loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def made(layers: int, width: int, rows: int, length: int) -> tuple[Model, Tensor]:
    """Make a model and a batch on the host, the same ones each time."""
    torch.manual_seed(0)
    return Model(layers, width), torch.randint(VOCABULARY, (rows, length + 1))


# ---- exactness


def trained(device: torch.device, sizes: tuple[int, ...], streamed: dict[str, Any] | None) -> list[Tensor]:
    """Train three steps; return losses, gradients and weights."""
    model, tokens = made(*sizes)
    tokens = tokens.to(device)
    found = []

    def train() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            loss = model(tokens)
            loss.backward()
            found.append(loss.detach().cpu())
            found.extend(p.grad.detach().cpu().clone() for p in model.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
        found.extend(p.detach().cpu().clone() for p in model.parameters())

    if streamed is None:
        model.to(device)
        train()
    else:
        with sp_lightning.stream(model, device, units="Block", **streamed):
            train()
    return found


def exactness(device: torch.device, tiny: bool) -> dict[str, str]:
    """Compare losses, gradients and weights of plain and streamed blocks, bit by bit."""
    sizes = (3, 64, 2, 16) if tiny else (3, 1024, 2, 512)
    where = (
        {} if device.type == "cpu" else {"optimizer_device": "device"}
    )  # the arithmetic of the plain run's optimizer
    torch.use_deterministic_algorithms(True, warn_only=True)
    plain = trained(device, sizes, None)
    rows = {}
    for label, options in {
        "window 1": {"window": 1},
        "window 2": {"window": 2},
        "window 1, recompute": {"window": 1, "activations": "recompute"},
    }.items():
        streamed = trained(device, sizes, options | where)
        differ = sum(
            not torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(plain, streamed, strict=True)
        )
        rows[label] = f"{len(plain)} tensors compared, {differ} differ"
    torch.use_deterministic_algorithms(False)
    return rows


# ---- rates


def synchronize(device: torch.device) -> None:
    """Wait for all that the device was given to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def per_second(device: torch.device, work: Callable[[], object], amount: float, tiny: bool) -> float:
    """Return how much of an amount is done in a second, by the fastest of some calls."""
    end, times = time.perf_counter() + (0 if tiny else SECONDS), []
    while len(times) < 4 or time.perf_counter() < end:
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return amount / min(times)


def rates(device: torch.device, tiny: bool) -> dict[str, float]:
    """Measure copies, the host's memory and products, in GB/s and TFLOP/s."""
    nbytes, width = (1 << 20, 128) if tiny else (1 << 28, 4096)
    pinned = device.type != "cpu"
    hosts = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    here = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.Stream(device) for _ in range(2)] if pinned else []

    def both() -> None:
        if not streams:
            return up(), down()
        with streams[0]:
            up()
        with streams[1]:
            down()

    def up() -> None:
        here[0].copy_(hosts[0], non_blocking=True)

    def down() -> None:
        hosts[1].copy_(here[1], non_blocking=True)

    values = torch.ones(nbytes // 4)
    found = {
        "to the device, GB/s": per_second(device, up, nbytes / 1e9, tiny),
        "to the host, GB/s": per_second(device, down, nbytes / 1e9, tiny),
        "both ways at once, GB/s": per_second(device, both, 2 * nbytes / 1e9, tiny),
        "host memory, GB/s": per_second(torch.device("cpu"), lambda: values.add_(1), 2 * nbytes / 1e9, tiny),
    }
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(width, width).to(device, dtype)
        name = f"products in {str(dtype).removeprefix('torch.')}, TFLOP/s"
        found[name] = per_second(device, lambda a=a: a @ a, 2 * width**3 / 1e12, tiny)
    return found


# ---- a clipped step, and its plan


def clipped_step(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Time a step whose gradients' norm is clipped, and plan the same step."""
    width = 64 if tiny else 2048
    block_nbytes = 12 * width**2 * 18  # weights, gradients, two moments and the copy that travels
    layers = 2 if tiny else max(2, min(12, psutil.virtual_memory().available // 3 // block_nbytes))
    model, tokens = made(layers, width, *((2, 16) if tiny else (4, 1024)))
    options = {"window": 2, "activations": "recompute"}
    plan = planned(model, tokens, "rtx4060" if tiny else "here", options)
    tokens = tokens.to(device)
    times = []
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    with sp_lightning.stream(model, device, units="Block", **options) as handle:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(STEPS):
            begin = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            handle.finish_step()
            times.append(time.perf_counter() - begin)
        stats = handle.stats()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": tokens.numel(),
        "seconds": statistics.median(times[2:]),
        "device GiB": stats["device_peak"] / GIB,
        "host GiB": (stats["host_weight_bytes"] + stats["host_gradient_bytes"]) / GIB,
        "compiled step": stats["compiled_step"],
        "plan": plan,
    }


def planned(model: Model, tokens: Tensor, machine: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what the plan of this step says, or why there is none: a report has all else without it."""
    try:
        plan = sp_lightning.plan(
            model,
            batch=(tokens,),
            machine=machine,
            precision="bf16-mixed",
            optimizer="AdamW",
            loss=lambda module, batch: module(*batch),
            clip=True,
            units="Block",
            **options,
        )
        return {"seconds": plan.step_s, "device GiB": plan.device_nbytes / GIB, "text": str(plan)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


# ---- the report


def facts(device: torch.device) -> dict[str, Any]:
    """Return what the figures are of."""
    card = platform.processor() or platform.machine()
    memory = psutil.virtual_memory().total
    if device.type != "cpu":
        properties = torch.cuda.get_device_properties(device)
        card, memory = properties.name, properties.total_memory
    return {
        "card": card,
        "device GiB": memory / GIB,
        "host GiB": psutil.virtual_memory().total / GIB,
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "WSL2": "microsoft" in platform.release().lower(),
        "ROCm": torch.version.hip,
        "CUDA": torch.version.cuda,
        "versions": {name: importlib.metadata.version(name) for name in ("sp-lightning", "torch", "lightning")},
    }


def report(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Make the whole report."""
    begin = time.perf_counter()
    made = {"tiny": tiny, "facts": facts(device)}
    for part, make in (("exactness", exactness), ("rates", rates), ("clipped step", clipped_step)):
        try:
            made[part] = make(device, tiny)
        except Exception as error:  # which is what a report is for
            made[part] = {"error": f"{type(error).__name__}: {error}"}
    made["plan"] = made["clipped step"].pop("plan", {})
    return made | {"seconds": time.perf_counter() - begin}


def table(made: dict[str, Any]) -> str:
    """Return the report as a table, without the plan's text."""
    lines = ["| | |", "| --- | --- |"]
    for part in ("facts", "exactness", "rates", "clipped step", "plan"):
        for name, value in made[part].items():
            if name != "text":
                shown = f"{value:.3g}" if isinstance(value, float) else value
                lines.append(f"| {part}: {name} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="all of it in small, which measures nothing")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("report_card.json"))
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which its products are not deterministic
    device = torch.device(options.device)
    if device.type != "cpu" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA or ROCm card here: try --device cpu --tiny, which only tries the script")
    made = report(device, options.tiny)
    options.json.write_text(json.dumps(made, indent=1) + "\n")
    print(table(made))
    print(f"\n{options.json} was written: please attach it to an issue of the form 'A report on a card'")


if __name__ == "__main__":
    main()

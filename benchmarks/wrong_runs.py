"""Patch each wrong run of tests/rigs/test_parity_harness.py into the library: does the default suite fail?

    python benchmarks/wrong_runs.py [--only NAME] [--jobs 2]

Each wrong run changes one method of `SuperpipelineStrategy` in a copy of the package, and the default run's `TESTS`
run against the copy until the first fails. The tests have to pass on the unchanged package.
The exit status is 1 if anything goes unnoticed.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import race_deletions

TESTS = ("tests/contract/test_exactness.py",)
STRATEGY = "lightning/strategy.py"

# What a method does wrong: `proceed()` is the right one. Here `batch` is the number of the batch, `trained` are the
# parameters with a gradient.
WRONG = {
    "a dropped gradient": ("backward", "proceed(); if batch == 1: trained()[-1].grad = None"),
    "a gradient dropped in the last batch": ("backward", "proceed(); if batch == 3: trained()[0].grad = None"),
    "a scaled gradient": ("backward", "proceed(); if batch == 1: trained()[-1].grad.mul_(1.5)"),
    "an overwritten accumulation": (
        "backward",
        "if batch % 3: [setattr(p, 'grad', None) for p in trained()]; proceed()",
    ),
    "zeros instead of no gradient": (
        "backward",
        "proceed(); [setattr(p, 'grad', torch.zeros_like(p)) for p in wanted() if p.grad is None]",
    ),
    "a negative zero": (
        "backward",
        "proceed(); [p.grad.copy_(torch.where(p.grad == 0, -0.0, p.grad)) for p in trained()]",
    ),
    "a buffer updated twice": ("backward", "proceed(); [b.mul_(0.9) for b in buffers()]"),
    "a random number of torch": ("backward", "if batch == 1: torch.rand(1); proceed()"),
    "a random number of Python": ("backward", "if batch == 1: __import__('random').random(); proceed()"),
    "a random number of NumPy": ("backward", "if batch == 1: __import__('numpy').random.rand(); proceed()"),
    "a random number in forward": ("training_step", "torch.rand(1); proceed()"),
    "a random number of the device": ("optimizer_step", "if batch == 3: torch.rand(1, device=device); proceed()"),
    "a scaled loss": ("training_step", "proceed(); result *= 2"),
    "a stale weight": (
        "optimizer_step",
        "before = wanted()[-1].detach().clone(); proceed(); wanted()[-1].data.copy_(before)",
    ),
    "a buffer changed by validation": ("validation_step", "proceed(); [b.mul_(2) for b in buffers()]"),
    "a wrong validation loss": ("validation_step", "w = wanted()[-1]; w.data.add_(1); proceed(); w.data.sub_(1)"),
    "zeroed optimizer state": ("on_train_end", "[t.zero_() for s in states() for t in s]; proceed()"),
    "a flag left in a group": ("on_train_end", "self.optimizers[0].param_groups[0]['streamed'] = True; proceed()"),
    "a prediction off by one number": ("predict_step", "proceed(); result = next_number(result)"),
}
PREAMBLE = '''

import functools
import torch


def next_number(value):
    """The same with another last bit, wherever tensors are."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.nextafter(value.float(), torch.tensor(torch.inf, device=value.device)).to(value.dtype) + 0
    if isinstance(value, dict):
        return type(value)({key: next_number(item) for key, item in value.items()})
    return [next_number(item) for item in value] if isinstance(value, (list, tuple)) else value


def tampered(method, wrong):
    @functools.wraps(method)
    def tampered(self, *args, **kwargs):
        return wrong(self, functools.partial(method, self, *args, **kwargs))

    return tampered


def wrong(self, right):
    result = None

    def proceed():
        nonlocal result
        result = right()

    module, device = self.lightning_module, self.root_device
    batch = module.trainer.fit_loop.epoch_loop.total_batch_idx
    wanted = lambda: [p for p in module.parameters() if p.requires_grad]
    trained = lambda: [p for p in wanted() if p.grad is not None]
    buffers = lambda: [b for b in module.buffers() if b.is_floating_point()]
    states = lambda: [[t for t in s.values() if isinstance(t, torch.Tensor)] for s in self.optimizers[0].state.values()]
'''


def patch(name: str, package: pathlib.Path) -> None:
    """Write a wrong run into a package."""
    method, statements = WRONG[name]
    lines = [f"    {line.strip()}" for line in statements.split("; ")]
    lines = [line.replace(": ", ":\n        ", 1) if line.strip().startswith("if ") else line for line in lines]
    here = f"SuperpipelineStrategy.{method}"
    code = "\n".join([PREAMBLE.rstrip(), *lines, "    return result", "", "", f"{here} = tampered({here}, wrong)", ""])
    compile(code, name, "exec")
    path = package / STRATEGY
    path.write_text(path.read_text() + code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a wrong run's name")
    parser.add_argument("--jobs", type=int, default=1, help="test runs at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = race_deletions.copied(race_deletions.ROOT, pathlib.Path(folder))
        if unchanged := race_deletions.verdict(source, None, TESTS, "-x").status:
            sys.exit(f"the tests end with status {unchanged} on the unchanged package: they can show nothing")
        changes = [(name, partial(patch, name)) for name in WRONG if options.only in name]
        with ThreadPoolExecutor(options.jobs) as pool:
            found = pool.map(lambda change: race_deletions.verdict(source, change[1], TESTS, "-x"), changes)
            caught = [say(name, result) for (name, _), result in zip(changes, found, strict=True)]
    sys.stdout.write(f"{len(changes)} changes, {caught.count(False)} of them can go unnoticed\n")
    return 0 if changes and all(caught) else 1


def say(name: str, result: race_deletions.Verdict) -> bool:
    """Print the result of one, as soon as it is there."""
    sys.stdout.write(f"{textwrap.shorten(name, 70):70} {result}\n")
    sys.stdout.flush()
    return result.caught


if __name__ == "__main__":
    sys.exit(main())

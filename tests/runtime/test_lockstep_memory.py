"""``at_once="auto"``: as many calls in lockstep as fit on the device (calls/call_memory.py)."""

from __future__ import annotations

import functools
import operator
import re

import pytest
import torch
from torch import nn

import sp_lightning
from sp_lightning.errors import OptionError
from sp_lightning.memory.layout import aligned

pytestmark = pytest.mark.simgpu

MIB = 2**20
KEPT, WORKS = MIB // 4, MIB  # bytes of a call between units, and of the running one beside that


class Keeps(nn.Module):
    """Keeps bytes through its forward, as with a cache, and works with more between units."""

    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x, kept=KEPT):
        cache = torch.zeros(kept, dtype=torch.uint8, device=x.device)
        for block in self.blocks:
            x = block(x).tanh()
            x = x + torch.zeros(WORKS, dtype=torch.uint8, device=x.device)[:1]
        return x + cache[:1]


class Run:
    """Calls of a network of which it counts how many are under way."""

    def __init__(self, net, capacity, device="simgpu", **options):
        self.under_way, self.most, self.options = 0, 0, options
        self.net, self.device, self.capacity = net, torch.device(device), capacity

    def call(self, forward):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return forward()
        finally:
            self.under_way -= 1

    def run(self, forwards, at_once="auto"):
        """Run forwards in lockstep on a device of this capacity; return the results and the peak."""
        import simgpu

        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        capacity, simgpu.config.capacity = simgpu.config.capacity, before + self.capacity
        try:
            with sp_lightning.stream(self.net, self.device, **self.options) as handle, torch.no_grad():
                handle.engine.window.only_inference = True  # as in Trainer.predict: its passes show what is needed
                results = handle.lockstep([functools.partial(self.call, one) for one in forwards], at_once)
                self.window = handle.stats()["window"]
        finally:
            simgpu.config.capacity = capacity
        return results, torch.accelerator.max_memory_allocated() - before


def forwards(net, count, kept=KEPT):
    width = net.blocks[0].in_features
    return [functools.partial(net, torch.full((1, width), float(n), device="simgpu"), kept) for n in range(count)]


@pytest.mark.parametrize("window", [1, 4, "auto"])
@pytest.mark.few(1)
def test_as_many_calls_are_under_way_as_fit_beside_the_window(window):
    net, capacity = Keeps(), 8 * MIB
    run = Run(net, capacity, window=window)
    results, peak = run.run(forwards(net, 60))
    block = sum(aligned(p.nbytes) for p in net.blocks[0].parameters())
    room = 0.95 * capacity - block * (2 if window == "auto" else window) - WORKS
    assert room / KEPT - 2 <= run.most <= room / KEPT
    assert peak <= capacity
    expected, _ = Run(net, 16 * MIB, window=window).run(forwards(net, 60), 1)
    assert all(map(torch.equal, results, expected))


def test_the_first_call_runs_alone_and_one_at_least_runs():
    net = Keeps()
    run = Run(net, int(1.4 * MIB), window=1)
    run.run(forwards(net, 3))
    assert run.most == 1


def test_a_call_that_keeps_more_counts_from_then_on():
    net, capacity = Keeps(), 8 * MIB
    run = Run(net, capacity, window=1)
    _, peak = run.run([*forwards(net, 1), *forwards(net, 24, KEPT // 4), *forwards(net, 40, 2 * KEPT)])
    assert run.most > 20 and peak <= capacity


def test_an_auto_window_shrinks_before_calls_take_its_memory(caplog):
    net, capacity = Keeps(512), 8 * MIB  # of which all blocks together take more
    run = Run(net, capacity, window="auto")
    with caplog.at_level("INFO"):
        _, peak = run.run([lambda: list(map(operator.call, forwards(net, 4))), *forwards(net, 30)])
    assert run.most > 12 and peak <= capacity
    assert re.search(r"window \d -> [4-7]\b", caplog.text) and re.search(r"window [4-7] -> 2\b", caplog.text)


def test_an_auto_window_keeps_all_units_where_calls_fit_beside_them(caplog):
    net, capacity = Keeps(256), 5 * MIB  # of which all blocks together take 2 MiB
    run = Run(net, capacity, window="auto")
    with caplog.at_level("INFO"):
        _, peak = run.run([lambda: list(map(operator.call, forwards(net, 4))), *forwards(net, 30)])
    room = 0.95 * capacity - sum(aligned(p.nbytes) for p in net.parameters()) - WORKS
    assert room / KEPT - 2 <= run.most <= room / KEPT and peak <= capacity
    assert "window 4 -> 8" in caplog.text and "window 8 ->" not in caplog.text and run.window == 8


@pytest.mark.seldom
def test_prompts_generate_with_as_many_caches_as_fit():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=97
    )
    model = transformers.LlamaForCausalLM(config).eval()
    prompts = torch.randint(97, (40, 8, 60), generator=torch.Generator().manual_seed(1)).to("simgpu")
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    calls = [functools.partial(model.generate, prompt, **how) for prompt in prompts]
    capacity = 16 * MIB
    run = Run(model, capacity, window=2)
    results, peak = run.run(calls)
    cache = 4 * 2 * 8 * 63 * 64 * 4  # layers, keys and values, rows, tokens, features, bytes
    weights = sum(p.nbytes for p in model.parameters())
    assert peak <= capacity
    assert run.most <= (capacity - weights / 2) / cache  # of the layers two are on the device, with the root
    with pytest.raises(torch.OutOfMemoryError):
        Run(model, capacity, window=2).run(calls, round(1.5 * run.most))
    alone, _ = Run(model, capacity, window=2).run(calls[-3:], 1)
    assert all(map(torch.equal, results[-3:], alone))


def test_eight_are_under_way_on_the_cpu():
    net = Keeps()
    run = Run(net, 16 * MIB, "cpu")
    x = torch.ones(1, 64)
    with sp_lightning.stream(net, "cpu") as handle, torch.no_grad():
        handle.lockstep([functools.partial(run.call, functools.partial(net, x))] * 20, at_once="auto")
    assert run.most == 8


@pytest.mark.parametrize("value", [0, 1.5, True, "all"])
def test_other_numbers_of_calls_are_refused(value):
    with sp_lightning.stream(Keeps(), "cpu") as handle:
        with pytest.raises(OptionError, match="at_once must be 'auto' or an int >= 1"):
            handle.lockstep([], at_once=value)

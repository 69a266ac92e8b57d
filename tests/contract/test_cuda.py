"""torch's own CUDA code on a machine without a GPU (nullcuda): what raises, what is copied, what memory it takes, and
whether numbers are the plain run's."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import forks
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SLOW = pytest.mark.slow  # each of these takes a process


@pytest.fixture
def run(null_cuda):
    """Gives what a Python process there prints at last, as JSON."""
    pytest.importorskip("transformers")

    def run(code, *arguments, **settings):
        env = null_cuda(**settings)
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(ROOT), *filter(None, sys.path)])
        begins_with = {name: env[name] for name in BEGINS_WITH if name in env}
        done = forks.run(PREAMBLE + code, *arguments, env=env, modules=MODULES, begins_with=begins_with)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


BEGINS_WITH = ("LD_PRELOAD", "LD_LIBRARY_PATH", "NULLCUDA_KERNELS", "PYTHONPATH")
MODULES = ("lightning", "transformers.models.llama.modeling_llama", "sp_lightning", "nullcuda")
PREAMBLE = """
import contextlib, functools, json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import nullcuda
import sp_lightning

nullcuda.read_settings()  # an error where it is not there
assert not torch.cuda.is_initialized()

def llama(hidden=256, layers=6, vocabulary=1024):
    heads = hidden // 64
    return LlamaForCausalLM(LlamaConfig(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, vocab_size=vocabulary))

def step(model, optimizer, ids):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize(ids.device)
"""


@SLOW
def test_what_travels_is_page_locked_counted_and_allocated_once(run):
    found = run("""
said = {}
ways = [{"activations": name} for name in ("keep", "recompute", "offload", "recompute+offload")]
for options in [*ways, {"host_memory": "pageable"}, {"optimizer_overlap": False}]:
    model = llama()
    handle = sp_lightning.stream(model, "cuda", window=2, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
    for _ in range(3):
        step(model, optimizer, ids)
    handle.finish_step()  # gradients are counted as they are sent
    before, stats = nullcuda.counts(), handle.stats()
    for _ in range(3):
        step(model, optimizer, ids)
    handle.finish_step()
    after, later = nullcuda.counts(), handle.stats()
    counted = {name: later[name] - stats[name] for name in later if name.startswith("bytes")}
    said[str(options)] = [[b - a for a, b in zip(before, after)], counted]
    if options != {"optimizer_overlap": False}:  # the last is still open when the process ends
        handle.close()
print(json.dumps(said))
""")
    for options, (counts, counted) in found.items():
        up, down, not_locked, kernels, device_nbytes, locked_nbytes = counts
        assert kernels and not (not_locked or device_nbytes or locked_nbytes), (options, counts)
        assert up == counted["bytes_up"], options
        assert 0 <= down - counted["bytes_down"] <= 3, options  # transformers asks once a step whether there is padding


@SLOW
@pytest.mark.parametrize(
    "activations",
    ["keep", *(pytest.param(name, marks=SLOW) for name in ("recompute", "offload", "recompute+offload"))],
)
def test_a_plan_says_what_torchs_allocator_will_have_given_out(activations, run, monkeypatch):
    """Beside cuBLAS's workspaces; the plan is less by what is too small to be planned, such as seeds."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    planned, measured = run(
        """
import lightning as L
from sp_lightning.plan.machines import MACHINES

options = {"activations": sys.argv[1], "window": 2}
shape = dict(hidden=768, layers=5, vocabulary=16000)
plan = sp_lightning.plan(
    functools.partial(llama, **shape), {"input_ids": torch.zeros(8, 1024, dtype=torch.long)}, precision="bf16-mixed",
    optimizer="AdamW", machine=MACHINES["h200"], device="cuda",
    loss=lambda module, batch: module(**batch, labels=batch["input_ids"]).loss, **options,
)

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = llama(**shape)

    def training_step(self, batch, _):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

trainer = L.Trainer(strategy=sp_lightning.SuperpipelineStrategy(**options), accelerator="gpu", devices=1,
    precision="bf16-mixed", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(24, 1024, dtype=torch.long), 8))
planned = sum(nbytes for name, nbytes in plan.device_terms.items() if name not in ("reserve", "workspaces"))
print(json.dumps([planned, torch.cuda.max_memory_allocated()]))
""",
        activations,
    )
    assert planned <= measured <= planned + planned // 1000, (planned, measured)


@pytest.mark.parametrize("nbytes", [1000, pytest.param(2**34, marks=SLOW)])
@pytest.mark.slow
def test_a_plan_is_made_without_touching_the_device(nbytes, run):
    """Beside a device that can be asked, and beside one that others fill."""
    arguments = "--model llama-3b --batch 4 --seq 512 --activations recompute --machine rtx3060".split()
    lines = run(
        """
import contextlib, io, runpy
sys.argv = ["sp_lightning", "plan", *sys.argv[1:]]
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    runpy.run_module("sp_lightning", run_name="__main__")
print(json.dumps(out.getvalue().splitlines()[:2]))
""",
        *arguments,
        nbytes=nbytes,
    )
    assert lines[0].startswith("llama-3b: ") and lines[1].startswith("on rtx3060: ") and lines[1].endswith(": fits")


@pytest.mark.slow
def test_unlockable_memory_uses_a_ring_or_is_a_contained_error(run):
    found = run(
        """
said = {}
for kind in ("auto", "pinned"):
    model = llama()
    try:
        with sp_lightning.stream(model, "cuda", window=2, host_memory=kind) as handle:
            optimizer = torch.optim.AdamW(model.parameters())
            ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
            for _ in range(3):
                step(model, optimizer, ids)
            said[kind] = torch.ones(2, device="cuda").shape[0]
    except sp_lightning.errors.HostMemoryError as error:
        said[kind] = str(error)
    said[kind + " after"] = (torch.ones(2, device="cuda") + 1).shape[0]
print(json.dumps(said))
""",
        lockable=16 << 20,
    )
    assert found["auto"] == found["auto after"] == found["pinned after"] == 2
    assert "could not be page-locked" in found["pinned"]


@pytest.mark.slow
def test_a_device_that_is_full_is_told_as_what_it_is(run):
    found = run(
        """
model = llama()
with sp_lightning.stream(model, "cuda", window=2) as handle:
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.zeros(2, 64, dtype=torch.long, device="cuda"))
    try:
        step(model, optimizer, torch.zeros(64, 512, dtype=torch.long, device="cuda"))
    except torch.OutOfMemoryError as error:
        said = [type(error).__name__, str(error)]
    optimizer.zero_grad()
    step(model, optimizer, torch.zeros(2, 64, dtype=torch.long, device="cuda"))
print(json.dumps(said))
""",
        nbytes=256 << 20,
    )
    assert found[0] == "DeviceMemoryError", found


@SLOW
def test_another_device_than_the_first_is_streamed_to_alone(run):
    touches = run(
        """
import lightning as L

ways = [{"activations": name} for name in ("keep", "recompute", "offload", "recompute+offload")]
for options in [*ways, {"host_memory": "pageable"}, {"optimizer_overlap": False}]:
    model = llama()
    with sp_lightning.stream(model, "cuda:1", window=2, **options):
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.zeros(2, 64, dtype=torch.long, device="cuda:1")
        for _ in range(3):
            step(model, optimizer, ids)

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = llama()

    def training_step(self, batch, _):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

by_hand = [nullcuda.touches(0), nullcuda.touches(1)]
trainer = L.Trainer(strategy="superpipeline", accelerator="gpu", devices=[1], precision="bf16-mixed", max_steps=3,
    logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(6, 64, dtype=torch.long), 2))
print(json.dumps([by_hand, [nullcuda.touches(0), nullcuda.touches(1)]]))
""",
        devices=2,
    )
    (first, second), (first_after, second_after) = touches
    assert not first and not first_after and 0 < second < second_after, touches


@SLOW
@pytest.mark.parametrize("late", [False, True])
def test_quantised_weights_compute_what_they_do_plainly(late, run):
    pytest.importorskip("torchao")
    found = run(
        """
sys.modules.pop("torchao")  # kept from transformers, which would ask for the device
import wrapped
from side_by_side import check, inputs

def evaluated(module, device):
    with torch.no_grad():
        yield [module(x) for x in inputs(device, 3)]

def by_float8(layer):
    wrapped.by_config("Float8DynamicActivationFloat8WeightConfig")(layer.bfloat16())

torch.cuda.get_device_capability = lambda *_: (9, 0)  # of which torchao makes weights whose kernel the CPU has
wrapped.FORMS["float8-dynamic"] = by_float8
moved = {}
for number, form in enumerate(wrapped.FORMS):
    if form == "int4":  # whose kernels are the CPU's
        continue
    act = wrapped.trained_and_evaluated if form in wrapped.TRAINED else evaluated
    ways = ("keep", "recompute", "offload", "recompute+offload")
    options = {"window": 1 + number % 2, "activations": ways[number % 4]}
    moved[form] = check(wrapped.adapted(form), act, torch.device("cuda", 0), **options)["bytes_up"]
print(json.dumps(moved))
""",
        numbers=True,
        late=late,
    )
    assert len(found) == 11 and all(found.values())


# ---- numbers


CELLS = [
    ("tied_embedding", "bf16-mixed", 1, "recompute+offload"),
    ("multihead_attention", "16-mixed", 2, "keep"),
    ("dropout", "32-true", 2, "recompute"),
    ("uneven_convnet", "bf16-mixed", 1, "offload"),
    ("lstm", "32-true", 1, "recompute"),
    ("mixture_of_experts", "bf16-true", 100, "recompute+offload"),
]


ATTENDS = """
from torch.nn.functional import scaled_dot_product_attention
orders, order = [], torch._C._get_sdp_priority_order  # of the kernels for attention

class Attends(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)[None, None]
        y = scaled_dot_product_attention(y, y, y)[0, 0]
        orders.append(order())
        return y * y

net, first = torch.nn.Sequential(*(Attends(8, 8) for _ in range(3))), order()
"""


def test_recompute_uses_the_order_of_attention_kernels_torch_set(run):
    """As torch does at the first attention of a process on such a device."""
    first, orders, last = run(
        ATTENDS
        + """
with sp_lightning.stream(net, "cuda", window=1, activations="recompute"):
    net(torch.ones(4, 8, device="cuda")).sum().backward()
print(json.dumps([first, orders, order()]))
""",
        numbers=True,
        capability=90,
    )
    assert len(orders) == 6 and set(map(tuple, orders)) == {tuple(last)} and last != first


@pytest.mark.parametrize("late", [pytest.param(False, marks=SLOW), True])
def test_results_are_plain_lightnings(late, run):
    """What nothing orders raises; what waits too little has other numbers at once or late."""
    found = run(
        """
import models, parity
said = []
with contextlib.redirect_stdout(sys.stderr):
    for case, precision, window, activations in json.loads(sys.argv[1]):
        options = {"window": window, "activations": activations}
        told = parity.check(models.case(case), options, accelerator="cuda", precision=precision)
        said.append(told["fetches"])
    make = functools.partial(models.ZooModule, models.case("mlp"), fused=True)  # which unscales by itself
    for options in ({}, {"optimizer_overlap": False}):
        strategies = parity.plain_strategy("cuda"), parity.streaming_strategy("cuda", **options)
        runs = [parity.record(make, strategy, accelerator="cuda", precision="16-mixed") for strategy in strategies]
        parity.compare(*runs)
    for optimizer, implementation in (("adamw", {}), ("sgd", {"foreach": True}), ("adamw", {"fused": True})):
        for precision, clip in (("bf16-mixed", None), ("16-mixed", ["norm", 0.1])):
            kind = functools.partial(models.ZooModule, **implementation)
            settings = {"precision": precision, "clip": clip if "fused" not in implementation else None}
            for place in ({}, {"disk": ".", "host_budget": "0B"}):
                options = {"optimizer_device": "device", "window": 2, **place}
                settings |= {"accelerator": "cuda", "optimizer": optimizer, "kind": kind}
                parity.check(models.case("mlp"), options, **settings)
print(json.dumps(said))
""",
        json.dumps(CELLS),
        numbers=True,
        late=late,
    )
    assert len(found) == len(CELLS) and all(found)


ORDERED = """
x, host = torch.zeros(1 << 16, device="cuda"), torch.zeros(1 << 16).pin_memory()
torch.cuda.synchronize()
side = torch.cuda.Stream()
said = []
for waits in (True, False):
    x += 1
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            host.copy_(x, non_blocking=True)
        early = host[0].item()
        side.synchronize()
        said.append([early, host[0].item()])
    except RuntimeError as error:
        said.append(str(error).splitlines()[0])
    torch.cuda.synchronize()
print(json.dumps(said))
"""


@pytest.mark.parametrize("late, early", [pytest.param(False, 1.0, marks=SLOW), (True, 0.0)])
def test_a_copy_may_be_late_but_is_refused_where_unordered(late, early, run):
    ordered, unordered = run(ORDERED, numbers=True, late=late)
    assert ordered == [early, 1.0]
    assert "a copy down reads on stream" in unordered and "aten::add_ writes on stream 0" in unordered


def test_a_streamed_module_refuses_a_cuda_graph_and_runs_on(run):
    *said, runs_on = run(
        """
net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
x, said = torch.ones(2, 8, device="cuda"), []
with sp_lightning.stream(net, "cuda", window=3), torch.no_grad():
    for captures in (lambda: torch.cuda.graph(torch.cuda.CUDAGraph()), contextlib.nullcontext):
        net(x)  # all units are on the device
        try:
            with captures():
                net(x)
            said.append("nothing")
        except sp_lightning.errors.UnsupportedError as error:
            said.append(str(error))
print(json.dumps(said))
""",
        numbers=True,
    )
    assert said[0].startswith("0 was entered while a CUDA graph is captured") and runs_on == "nothing"

"""Loops with accelerate leave the same bits when their models stream."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import types

import hf_runs
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hf_runs import compare, llama, rows
from torch import nn
from torch.utils.data import DataLoader

import parity
import sp_lightning.hf


def loop(folder, accumulate=1, zeroes_first=False, **options):
    torch.manual_seed(1)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, **options)
    loader = DataLoader(rows(), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(2):
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if zeroes_first:
                    optimizer.zero_grad()
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    yield f"norm {epoch}.{index}", accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                if not zeroes_first:
                    optimizer.zero_grad()
                yield f"loss {epoch}.{index}", loss
    accelerator.save_state(str(folder / "state"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(folder / "state"))
    model.eval()
    with torch.no_grad():
        yield "logits", model(**next(iter(loader))).logits
    yield "tokens", accelerator.unwrap_model(model).generate(rows(1)[0]["input_ids"][None].to(accelerator.device))
    yield "weights", accelerator.unwrap_model(model).state_dict()
    yield "state", optimizer.state_dict()["state"]


LOOPS = {
    "plain": {},
    "bf16 and accumulating": {"accumulate": 2, "mixed_precision": "bf16"},
    "zeroing first": {"zeroes_first": True},
}
SLOW = [("bf16 and accumulating", "cpu"), ("zeroing first", "simgpu"), ("plain", "cpu")]


@pytest.mark.parametrize(
    "kind, device",
    [
        pytest.param(
            kind,
            device,
            marks=[pytest.mark.slow] * ((kind, device) in SLOW) + [pytest.mark.simgpu] * (device == "simgpu"),
        )
        for kind in LOOPS
        for device in ("cpu", "simgpu")
    ],
    indirect=["device"],
)
def test_a_loop_leaves_the_bits_of_the_stock_run(kind, device, tmp_path):
    found = compare(functools.partial(loop, **LOOPS[kind]), tmp_path)
    assert found["held_steps"] == [{"bf16 and accumulating": 4}.get(kind, 8)]


def adapters_of_a_denoiser(folder, **options):
    """The shape of diffusers' training scripts: frozen parts that are moved, and a denoiser whose adapters train."""
    torch.manual_seed(1)
    encoder, denoiser = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2))
    accelerator = Accelerator(mixed_precision="bf16", **options)
    encoder.requires_grad_(False).to(accelerator.device, dtype=torch.bfloat16)
    denoiser.requires_grad_(False).to(accelerator.device)
    for layer in denoiser:
        layer.register_parameter("adapter", nn.Parameter(torch.zeros(8)))
        layer.register_forward_hook(lambda layer, _, output: output + layer.adapter)
    trained = [p for p in denoiser.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    loader = DataLoader(torch.randn(16, 8, generator=torch.Generator().manual_seed(2)), batch_size=4)
    denoiser, optimizer, loader = accelerator.prepare(denoiser, optimizer, loader)
    for index, x in enumerate(loader):
        with accelerator.accumulate(denoiser):
            with torch.no_grad():
                hidden = encoder(x.to(torch.bfloat16))
            loss = (denoiser(hidden.float()) - x).square().mean()
            accelerator.backward(loss)
            yield f"norm {index}", accelerator.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield f"loss {index}", accelerator.gather(loss)
    yield "weights", accelerator.unwrap_model(denoiser).state_dict()


def two_models(folder, **options):
    """Two models that train in turn, each with an optimizer of its own."""
    torch.manual_seed(1)
    nets = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, out)) for out in (8, 1)]
    optimizers = [torch.optim.Adam(net.parameters(), 1e-2) for net in nets]
    accelerator = Accelerator(**options)
    maker, judge, of_maker, of_judge = accelerator.prepare(*nets, *optimizers)
    for index in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index)).to(accelerator.device)
        made = maker(x)
        of_judge.zero_grad()
        accelerator.backward((judge(x) - 1).square().mean() + judge(made.detach()).square().mean())
        of_judge.step()
        of_maker.zero_grad()
        loss = (judge(made) - 1).square().mean()
        accelerator.backward(loss)
        of_maker.step()
        yield f"loss {index}", loss
    for index, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
        yield f"ends {index}", [net.state_dict(), optimizer.state_dict()["state"]]


@pytest.mark.slow
@pytest.mark.parametrize("run", [adapters_of_a_denoiser, two_models])
@pytest.mark.parametrize("device", ["cpu", pytest.param("simgpu", marks=pytest.mark.simgpu)], indirect=True)
def test_a_loop_over_two_models_leaves_the_bits_of_the_stock_run(run, device, tmp_path):
    assert len(compare(run, tmp_path)["handles"]) == (2 if run is two_models or device.type != "cpu" else 1)


class Scaled(nn.Module):
    """Has a weight of its own above its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.layers(x) * self.scale


def forward(model, x):  # pickled by its name
    return 0.5 * type(model).forward(model, x)


def beside_a_layer(folder, **options):
    """Resumes a model, and a layer and a weight that are on the device as ever, each with an optimizer."""
    torch.manual_seed(1)
    accelerator = Accelerator(**options)
    layer = nn.Linear(8, 8).to(accelerator.device)
    scale = nn.Parameter(torch.ones(8, device=accelerator.device))
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    kinds = [[*net.parameters(), scale], [*layer.parameters()]]
    net, *optimizers = accelerator.prepare(net, *(torch.optim.AdamW(one, 1e-2, foreach=False) for one in kinds))
    x = torch.ones(2, 8, device=accelerator.device)
    for index in range(4):
        if index == 2:
            accelerator.save_state(str(folder / "state"))
            accelerator.load_state(str(folder / "state"))
        accelerator.backward((net(layer(x)) * scale).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    yield "ends", [net.state_dict(), layer.state_dict(), scale]
    yield "state", [optimizer.state_dict()["state"] for optimizer in optimizers]


@pytest.mark.parametrize("device", [pytest.param("simgpu", marks=pytest.mark.simgpu)], indirect=True)
def test_loaded_state_of_what_is_on_the_device_stays_there(device, tmp_path):
    compare(beside_a_layer, tmp_path)


def copied_and_unwrapped(folder, make=Scaled, patched=False, **options):
    """Copies of a prepared model are asked, and the model without what accelerate put in front of it trains on."""
    torch.manual_seed(1)
    model = make()
    if patched:
        model.forward = types.MethodType(forward, model)
    accelerator = Accelerator(mixed_precision="bf16", **options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).to(accelerator.device)

    def copies():
        made = copy.deepcopy(accelerator.unwrap_model(model)), pickle.loads(pickle.dumps(model))
        for one in made:
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.mul_(0.5)
            yield one.to(accelerator.device)(x)

    def train():
        for _ in range(2):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    yield "trained", list(train())
    yield "copies", list(copies())
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    yield "unwrapped", [bare(x), type(bare.forward) is types.MethodType]
    yield "trained on", list(train())
    yield "copies of it", list(copies())
    yield "weights", bare.state_dict()


@pytest.mark.parametrize("device", ["cpu", pytest.param("simgpu", marks=pytest.mark.simgpu)], indirect=True)
@pytest.mark.parametrize("options", [{}, {"make": lambda: nn.Sequential(Scaled(), Scaled())}, {"patched": True}])
def test_copies_of_what_accelerate_wraps_are_as_in_the_stock_run(options, device, tmp_path):
    compare(functools.partial(copied_and_unwrapped, **options), tmp_path)


def in_contexts(streams, copies=False, mixed_precision="bf16", **settings):
    """The loop of one accelerator, in two contexts one after the other if it streams; copies are prepared, too."""
    AcceleratorState._reset_state(True)
    torch.manual_seed(1)
    accelerator = Accelerator(mixed_precision=mixed_precision, **settings)
    model, seen, streamed = Scaled(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    for number in range(2):
        with contextlib.ExitStack() as stack:
            if streams:
                stream = stack.enter_context(sp_lightning.hf.streaming(window=1))
            model, optimizer = accelerator.prepare(model, optimizer)
            frozen = copy.deepcopy(model).requires_grad_(False) if copies else None
            reference = accelerator.prepare_model(frozen, evaluation_mode=True) if copies else torch.zeros_like
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(accelerator.device)
            for _ in range(2):
                loss = (model(x) - reference(x)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.detach().cpu())
            if streams:
                streamed.append([handle.module for handle in stream.handles])
                assert all(type(one) is Scaled for one in streamed[-1])
        if streams:
            hf_runs.assert_plain_but_prepared(accelerator.unwrap_model(model))
    seen += [p.detach().cpu() for p in model.parameters()]
    return seen, [len(models) for models in streamed]


COMPILED = {"mixed_precision": "no", "dynamo_backend": "eager"}  # which has no simulated device


@pytest.mark.parametrize(
    "settings, device",
    [
        *(pytest.param(one, "simgpu", marks=pytest.mark.simgpu) for one in ({}, {"copies": True})),
        *((one, "cpu") for one in ({}, {"copies": True}, COMPILED)),
    ],
    indirect=["device"],
)
def test_a_prepared_model_and_its_copies_stream_in_a_new_context(settings, device):
    """accelerate's mark of it says nothing of where it is."""
    (expected, _), (found, streamed) = in_contexts(False, **settings), in_contexts(True, **settings)
    assert streamed == [2 if "copies" in settings else 1] * 2
    assert all(map(torch.equal, expected, found))


class Wrapper(torch.optim.Optimizer):
    """Shows nothing of the state of the optimizer inside."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    defaults = property(lambda self: self.inner.defaults)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


def test_an_optimizer_inside_of_another_is_loaded(tmp_path):
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with sp_lightning.hf.streaming(window=1):
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(net, Wrapper(torch.optim.AdamW(net.parameters())))
        accelerator.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
        accelerator.save_state(str(tmp_path))
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.optimizer.inner.state.clear()
        accelerator.load_state(str(tmp_path))
        loaded = dict(parity.leaves(optimizer.state_dict()))
    assert all(parity.difference(leaf, loaded[path]) is None for path, leaf in parity.leaves(saved))

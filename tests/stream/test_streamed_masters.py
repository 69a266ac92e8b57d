"""Master weights: FP32 on the host, half precision on the device; as if a copy in half precision computed."""

import copy

import pytest
import torch
from often import often
from stream_programs import POLICIES, Block, Net, Run, compare, device_named, streamed

from sp_lightning.errors import ExactnessError

HALVES = [torch.bfloat16, torch.float16]


def trained_by_hand(model, device, dtype, steps, accumulated=1, clip=None, fused=None):
    """Train FP32 weights with the gradients of a copy in half precision."""
    run, half = Run(device, False), copy.deepcopy(model).to(device, dtype)
    masters = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(masters.parameters(), 1e-2, fused=fused)
    for i in range(steps):
        for low, full in zip(half.parameters(), masters.parameters(), strict=True):
            low.data.copy_(full.data)
        for part in range(accumulated):
            half.zero_grad()
            half(run.x(i * accumulated + part).to(dtype)).square().mean().backward()
            for low, full in zip(half.parameters(), masters.parameters(), strict=True):
                full.grad = low.grad.float() if full.grad is None else full.grad.add_(low.grad)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return masters, optimizer


def trained_streamed(model, device, dtype, steps, accumulated=1, clip=None, fused=None, **options):
    run = Run(device, True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
    with streamed(model, str(device.type), wire=dtype, master_weights=True, **options):
        for i in range(steps):
            for part in range(accumulated):
                model(run.x(i * accumulated + part).to(dtype)).square().mean().backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def check(device, dtype, training=None, **options):
    place = device_named(device)
    torch.manual_seed(0)
    model = Net()
    training = training or {}
    wanted, their = trained_by_hand(model, place, dtype, 4, **training)
    found, our = trained_streamed(model, place, dtype, 4, **training, **options)
    assert {param.dtype for param in found.parameters()} == {torch.float32}
    compare("weight", list(wanted.parameters()), list(found.parameters()))
    states = [[v for state in one.state.values() for v in state.values()] for one in (their, our)]
    compare("state", *states)


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("policy", often(POLICIES))
@pytest.mark.simgpu
def test_masters_are_stepped_as_by_hand(device, dtype, policy):
    check(device, dtype, activations=policy)


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.parametrize("training", [{"accumulated": 3}, {"clip": 0.1}, {"accumulated": 2, "clip": 0.1}])
@pytest.mark.simgpu
def test_masters_are_accumulated_and_clipped_as_by_hand(device, training):
    check(device, torch.bfloat16, training)


@pytest.mark.simgpu
def test_masters_beside_units_that_stay_on_the_device():
    check("simgpu", torch.bfloat16, resident=2, window=2)


@pytest.mark.simgpu
def test_masters_have_the_device_s_arithmetic(arithmetic):
    check("simgpu", torch.bfloat16, {"clip": 0.1})
    check("simgpu", torch.bfloat16, {"fused": True})


class Reading(Block):
    def forward(self, x):
        assert self.up.weight.dtype is torch.bfloat16 and self.up.weight.data.dtype is torch.bfloat16
        return super().forward(x)


def test_a_forward_reads_weights_in_half_precision():
    model = Net(Reading)
    before = copy.deepcopy(model.state_dict())
    with streamed(model, "cpu", wire=torch.bfloat16, master_weights=True):
        model(torch.ones(4, 8, dtype=torch.bfloat16))
        assert model.blocks[0].up.weight.dtype is torch.float32
        compare("weight", list(before.values()), list(model.state_dict().values()))


class Writing(Block):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return super().forward(x)


def test_a_forward_that_writes_masters_is_refused():
    model = Net(Writing)
    with (
        streamed(model, "cpu", wire=torch.bfloat16, master_weights=True),
        pytest.raises(ExactnessError, match=r"blocks\.0\.up\.weight was written .* set master_weights=False"),
    ):
        model(torch.ones(4, 8, dtype=torch.bfloat16))


def test_writes_between_steps_go_up():
    model, x = Net(), torch.ones(4, 8, dtype=torch.bfloat16)
    with streamed(model, "cpu", wire=torch.bfloat16, master_weights=True), torch.no_grad():
        first = model(x)
        for param in model.parameters():
            param.mul_(2)
        second = model(x)
        model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
        assert torch.equal(model(x), first) and not torch.equal(first, second)


def test_half_of_the_bytes_go_up():
    model = Net()
    unit = sum(param.nbytes for param in model.blocks[0].parameters())
    with streamed(model, "cpu", wire=torch.bfloat16, master_weights=True) as handle, torch.no_grad():
        model(torch.ones(4, 8, dtype=torch.bfloat16))
        stats = handle.stats()
    assert stats["bytes_up"] < stats["fetches"] * (0.6 * unit + 6 * 512)

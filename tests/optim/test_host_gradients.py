"""The norm of gradients on the host: computed on several cores, with the bits of torch's on one."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import sp_lightning
from sp_lightning.compat.patches import CLIP_GRADIENTS, TOTAL_NORM
from sp_lightning.optim import host_gradients


@pytest.fixture
def threads():
    """Gives torch four threads on the host, for the time of a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


@pytest.fixture
def streamed(device, monkeypatch):
    """Makes norms be computed on several cores, however small the gradients are."""
    monkeypatch.setattr(host_gradients, "FEWEST", 1)
    net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(5)))
    with sp_lightning.stream(net, device=device, window=2):
        yield net


@pytest.fixture
def used(monkeypatch):
    """Notes on which threads norms are computed."""
    found, original = [], torch.linalg.vector_norm

    def noted(*args, **kwargs):
        found.append(threading.current_thread().name)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", noted)
    return found


def gradients():
    """Make gradients of all types, sizes and layouts, in turn."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        for shape in ((), (7,), (0, 3), (1000, 301), (3, 70_001), (1 << 20,)):
            found.append(torch.randn(shape, generator=generator).to(dtype))
        found += [torch.randn(400, 500, generator=generator).to(dtype).T, torch.randn(60_000).to(dtype)[::2]]
    return [found[place] for place in torch.randperm(len(found), generator=generator)]


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("kind", [2, 1, float("inf"), 0.5])
def test_the_norm_has_the_bits_of_torchs(kind, foreach, streamed, threads):
    found = [one for one in gradients() if one.numel() or kind != float("inf")]  # which has none of an empty one
    for some in (found, found[:1], [one for one in found if one.dtype is torch.float32]):
        expected = TOTAL_NORM.original(some, kind, foreach=foreach)
        assert get_total_norm(some, kind, foreach=foreach).equal(expected)


def test_several_are_computed_at_once_and_clipped_as_ever(streamed, threads, used):
    streamed(torch.ones(2, 300, device=next(iter(streamed.parameters())).device)).square().sum().backward()
    before = [parameter.grad.clone() for parameter in streamed.parameters()]
    norm = clip_grad_norm_(streamed.parameters(), 0.1)
    assert norm.equal(TOTAL_NORM.original(before))
    factor = torch.clamp(0.1 / (norm + 1e-6), max=1.0)
    assert all(p.grad.equal(one * factor) for p, one in zip(streamed.parameters(), before, strict=True))
    assert any(name.startswith("superpipeline-norms") for name in used)


@pytest.mark.simgpu
@pytest.mark.parametrize("first", [True, False])
def test_gradients_on_the_host_and_on_the_device_are_summed_in_the_order_of_a_plain_run(first):
    """The sum of squares of 17 norms has other bits in another order."""

    def norms(streamed):
        torch.manual_seed(0)
        net, scale = (
            nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))),
            nn.Parameter(torch.randn(16, device="simgpu")),
        )
        params = [*([scale] * first), *net.parameters(), *([scale] * (not first))]
        with sp_lightning.stream(net, "simgpu", window=2) if streamed else contextlib.nullcontext(net.to("simgpu")):
            for _ in range(8):
                for parameter in params:
                    parameter.grad = None
                (net(torch.randn(6, 16).to("simgpu")) * scale).square().mean().backward()
                yield clip_grad_norm_(params, 0.01).item()
                yield from [parameter.grad.cpu() for parameter in params]

    for expected, found in zip(list(norms(False)), list(norms(True)), strict=True):
        assert expected.equal(found) if isinstance(expected, torch.Tensor) else expected == found


@pytest.mark.parametrize("limit, writes", [(float("inf"), False), (1e6, False), (1e-3, True)])
def test_a_factor_of_one_writes_nothing(limit, writes, streamed, threads):
    streamed(torch.ones(2, 300, device=next(iter(streamed.parameters())).device)).square().sum().backward()
    before = [(parameter.grad.clone(), parameter.grad._version) for parameter in streamed.parameters()]
    norm = clip_grad_norm_(streamed.parameters(), limit)
    assert norm.equal(TOTAL_NORM.original([grad for grad, _ in before]))
    for parameter, (grad, version) in zip(streamed.parameters(), before, strict=True):
        assert (parameter.grad._version > version) is writes and parameter.grad.equal(grad) is not writes


@pytest.mark.parametrize("flushes", [True, False])
def test_a_factor_of_one_flushes_what_a_plain_one_flushes(flushes, streamed):
    found = []
    for plain in (False, True):
        weight = nn.Parameter(torch.zeros(3))
        weight.grad = torch.tensor([1e-40, 1.0, -1e-44])
        torch.set_flush_denormal(flushes)
        try:
            if not plain:
                clip_grad_norm_([weight], 2.0)
            else:
                CLIP_GRADIENTS.original([weight], 2.0, torch.tensor(1.0))
        finally:
            torch.set_flush_denormal(False)
        found.append(weight.grad.view(torch.int32))
    assert found[0].equal(found[1]) and bool(found[0][0] == 0) is flushes


def test_a_factor_of_one_multiplies_complex_gradients_as_ever(streamed):
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    weight.grad = torch.tensor([complex(float("inf"), 0), complex(1, 0)])
    expected = weight.grad * torch.tensor(1.0)
    nn.utils.clip_grads_with_norm_([weight], 2.0, torch.tensor(1.0))
    assert torch.view_as_real(weight.grad).isnan().equal(torch.view_as_real(expected).isnan())


def test_a_norm_that_is_not_finite_is_told_of_as_ever(streamed, threads):
    found = [torch.ones(100), torch.full((100,), float("inf"))]
    assert get_total_norm(found).isinf()
    with pytest.raises(RuntimeError, match="non-finite"):
        get_total_norm(found, error_if_nonfinite=True)


def test_what_torch_computes_on_one_core_does_not_depend_on_the_number_of_threads():
    """Else the bits would be those of another machine's plain run."""
    before = torch.get_num_threads()
    try:
        for one in gradients():
            if host_gradients._is_on_one_core(one):
                found = []
                for count in (1, 2, 3, 8):
                    torch.set_num_threads(count)
                    found.append(torch.linalg.vector_norm(one, 2.0))
                assert all(norm.equal(found[0]) for norm in found)
    finally:
        torch.set_num_threads(before)

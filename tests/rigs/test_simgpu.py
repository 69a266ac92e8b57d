"""The simulated device itself: that it fails where a real one would, and reports what a real one would hide."""

import contextlib
import random
import threading

import pytest
import torch

import simgpu

D = "simgpu"
acc = torch.accelerator
config = simgpu.config


def ones(n=1000, value=1.0):
    return torch.full((n,), value, device=D)


# ---- streams


@pytest.mark.parametrize("check", [0, 1, 2])
def test_use_before_copy_is_done(check):
    def run(wait):
        source, side, target = torch.ones(1000).pin_memory(), torch.Stream(device=D), ones(value=0.0)
        acc.synchronize()
        with contextlib.nullcontext() if wait else simgpu.hold(side):
            with side:
                target.copy_(source, non_blocking=True)
            if wait:
                acc.current_stream().wait_stream(side)
            return (target * 2).sum().item()

    config.check = check
    for _ in range(2):
        if check == 2:
            with pytest.raises(RuntimeError, match=r"race: .* reads on stream 0 memory that copy H2D writes on stream"):
                run(wait=False)
            acc.synchronize()
            simgpu.races()
        else:
            assert run(wait=False) == 0  # stale
            assert bool(simgpu.races()) == (check == 1)
        acc.synchronize()
        assert run(wait=True) == 2000
        assert not simgpu.races()


@pytest.mark.parametrize("record", [False, True])
def test_record_stream(record):
    side, x, out = torch.Stream(device=D), ones(), ones()
    side.wait_stream(acc.current_stream())
    acc.synchronize()
    with simgpu.hold(side):
        with side:
            torch.mul(x, 2, out=out)
        if record:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        y = ones(value=7.0)
        assert (y.data_ptr() == address) != record
        acc.current_stream().synchronize()
    side.synchronize()
    assert out.sum().item() == (2000 if record else 14000)
    assert bool(simgpu.races()) != record


def test_backward_runs_on_the_forwards_stream():
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((acc.current_stream(), threading.get_ident()))
            return grad

    side, w = torch.Stream(device=D), torch.randn(8, 8, device=D, requires_grad=True)
    side.wait_stream(acc.current_stream())
    with side:
        y = Spy.apply(w * 2)
    acc.current_stream().wait_stream(side)
    y.sum().backward()
    assert seen[0][0] == side and seen[0][1] != threading.get_ident()
    assert torch.equal(w.grad.cpu(), torch.full((8, 8), 2.0)) and not simgpu.races()


LOSSES = [getattr(torch.nn.functional, f"{name}_loss") for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin")]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_have_the_bits_of_the_cpu(loss, reduction):
    generator = torch.Generator().manual_seed(0)
    there, target = torch.randn(2, 3, 5, generator=generator)
    found = []
    for device in ("cpu", D):
        x = there.to(device, copy=True).requires_grad_()
        value = loss(x, target.to(device), reduction=reduction)
        value.sum().backward()
        found.append((value.detach().cpu(), x.grad.cpu()))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_random_programs(drop):
    """On three streams: with every needed wait the result is the CPU's and nothing is reported; wrong results are."""

    def run(seed):
        rnd, g = random.Random(seed), torch.Generator().manual_seed(seed)
        streams = [acc.current_stream(), torch.Stream(device=D), torch.Stream(device=D)]
        expected = [torch.randn(64, generator=g) for _ in range(4)]
        buffers, copies = [x.to(D) for x in expected], []
        written, read, dropped = [None] * 4, [[] for _ in range(4)], 0
        acc.synchronize()

        @contextlib.contextmanager
        def access(stream, *uses):  # (buffer, written to)
            nonlocal dropped
            for i, write in uses:
                for other, event in [written[i]] * bool(written[i]) + read[i] * write:
                    if other == stream:
                        continue
                    if rnd.random() < drop:
                        dropped += 1
                    else:
                        stream.wait_event(event)
            with stream:
                yield
            for i, write in uses:
                done = (stream, stream.record_event())
                if write:
                    written[i], read[i] = done, []
                else:
                    read[i].append(done)

        for _ in range(25):
            stream, (a, b) = rnd.choice(streams), rnd.sample(range(4), 2)
            config.compute_us, config.h2d_us, config.d2h_us = (
                rnd.choice(us) for us in ([0, 0, 200], [0, 300], [0, 300])
            )
            kind = rnd.randrange(4)
            if kind == 0:
                host = torch.randn(64, generator=g).pin_memory()
                with access(stream, (a, True)):
                    buffers[a].copy_(host, non_blocking=True)
                expected[a].copy_(host)
                del host
            elif kind == 1:
                with access(stream, (a, True), (b, False)):
                    buffers[a].add_(buffers[b] * 2 + 1)
                expected[a].add_(expected[b] * 2 + 1)
            elif kind == 2:
                host = torch.empty(64, pin_memory=True)
                with access(stream, (a, False)):
                    host.copy_(buffers[a], non_blocking=True)
                copies.append((host, expected[a].clone()))
            else:
                with access(stream, (a, True)):
                    buffers[a].mul_(0.5).sin_()
                expected[a].mul_(0.5).sin_()
        acc.synchronize()
        right = all(torch.equal(x.cpu(), y) for x, y in [*zip(buffers, expected, strict=True), *copies])
        return right, dropped, bool(simgpu.races())

    results = [run(seed) for seed in range(100)]
    if not drop:
        assert results == [(True, 0, False)] * 100
    assert not any(reported and not dropped for _, dropped, reported in results)
    assert all(right or reported for right, _, reported in results)
    assert not drop or sum(reported for _, _, reported in results) > 50

"""A plain loop over batches has the bits of the plain run, for every policy, window and kind of step."""

import contextlib

import pytest
import torch
from often import often
from stream_programs import POLICIES, Net, Program, check

LOOPS = {
    "plain": {},
    "clipped": {"clip": 0.1},
    "accumulated": {"batches": 2},
    "clipped_accumulated": {"clip": 0.1, "batches": 2},
    "autocast": {"autocast": True},
    "autocast_clipped_accumulated": {"autocast": True, "clip": 0.1, "batches": 2},
}


def program(clip=None, batches=1, autocast=False, wire=None):
    def loop(run, model):
        optimizer = run.adamw(model.parameters())
        kind, seen = run.device.type, []
        for i in range(5):
            for j in range(batches):
                cast = torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False)
                with cast if autocast else contextlib.nullcontext():
                    loss = model(run.x(10 * i + j)).float().square().mean()
                loss.backward()
                seen.append(loss.detach().clone())
            if clip:
                seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return Program(loop, Net, options={"wire": wire})


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.parametrize("window", often([1, 2, 3]))
@pytest.mark.parametrize("policy", often(POLICIES, "recompute"))
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.simgpu
def test_a_loop_has_the_bits_of_the_plain_run(loop, policy, window, device):
    options = LOOPS[loop]
    wire = torch.bfloat16 if options.get("autocast") else None
    check(program(**options, wire=wire), device, policy, window)


@pytest.mark.parametrize("resident", [1, 3, 9])
@pytest.mark.simgpu
def test_resident_units_change_no_bit(resident):
    loop = program(clip=0.1, batches=2)
    check(Program(loop.do, Net, options={"resident": resident}), "simgpu")


@pytest.mark.simgpu
def test_weights_that_travel_as_they_are_change_no_bit():
    check(program(autocast=True, clip=0.1), "simgpu")

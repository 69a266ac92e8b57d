"""Programs that compute on streams of their own inside of blocks leave what plain runs leave, without races.

Their backward stays on one stream: on the simulated device autograd does not keep what one stream gives another.
"""

import pytest
import torch
from often import often
from stream_programs import Block, Net, Program, cases, check, collected

PROGRAMS: list[Program] = []
program = collected(PROGRAMS)
side = {}  # the stream of a device, other than the caller's


def beside(function, x):
    """Compute on the side stream, behind the caller's; on the CPU there is none."""
    if x.device.type == "cpu":
        return function(x)
    here, own = torch.accelerator.current_stream(x.device), side.setdefault(x.device, torch.Stream(device=x.device))
    own.wait_stream(here)
    x.record_stream(own)
    with own:
        found = function(x)
    found.record_stream(here)
    return found


def join(x):
    """Have the caller's stream wait for the side stream."""
    if x.device.type != "cpu":
        torch.accelerator.current_stream(x.device).wait_stream(side[x.device])


class SideBlock(Block):
    """A block that computes its first layer on the side stream, and waits for it."""

    def forward(self, x):
        z = beside(self.up, self.norm(x))
        join(x)
        return x + self.down(z.relu())


class LateBlock(Block):
    """A block whose work on the side stream is waited for after all blocks."""

    def forward(self, x):
        h = self.norm(x)
        self.z = beside(lambda h: self.down(self.up(h).relu()), h)
        return x + h


class LateNet(Net):
    """Blocks whose work on the side stream is waited for at the end."""

    def __init__(self) -> None:
        super().__init__(LateBlock)

    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        join(x)
        return self.head(x + sum(block.z for block in self.blocks))


@program(LateNet)
def frozen_blocks_are_on_a_side_stream(run, model):
    for param in model.blocks.parameters():
        param.requires_grad_(False)
    model.emb.requires_grad_(False)
    with torch.no_grad():
        before = [model(run.x(i)) for i in range(3)]
    return [before, run.loop(model)]


@program(lambda: Net(SideBlock))
def a_side_stream_is_in_inference(run, model):
    with torch.no_grad():
        return [model(run.x(i)) for i in range(4)]


@pytest.mark.simgpu
@pytest.mark.parametrize("window", often([1, 2]))
@pytest.mark.parametrize("case, policy", cases(PROGRAMS))
def test_programs_with_side_streams_compute_the_same(case, policy, window):
    check(case, "simgpu", policy, window)

"""How often the host's cores go through memory for a step: bytes that they read and write for each parameter.

The counter knows nothing of slices. It gets the pointers of the compiled pass, and torch's operators on tensors in host
memory, but for tensors that are no larger than a slice: those stay in a core's cache. Copies of the device's are none
of the cores'.
"""

from collections import Counter

import pytest
import torch
from stream_programs import CHUNK, Run, stream
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_lightning.kernels.loader import Request
from sp_lightning.optim import compiled
from sp_lightning.optim.steps import Steps
from sp_lightning.stream import host_gradient

pytestmark = pytest.mark.simgpu

VIEWS = ("as_strided", "detach", "alias", "view", "slice", "set_", "resize_", "empty")  # which touch no bytes


class Counting(TorchDispatchMode):
    """Counts bytes that operators read and write in host memory."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {key: value for key, value in (kwargs or {}).items() if key != "out"}  # which is only written
        inputs = [one for one in tree_leaves((args, given)) if isinstance(one, Tensor)]
        outputs = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        name = func.overloadpacket.__name__
        if not name.startswith(VIEWS) and all(one.device.type == "cpu" for one in inputs):
            reads = inputs[1:] if name.startswith("copy_") else inputs
            for one in (*reads, *outputs):
                if one.untyped_storage().nbytes() > 4 * CHUNK:
                    self.counts[name] += one.nbytes
        return result


class Code:
    """The compiled code, whose passes are counted."""

    def __init__(self, code, counts):
        self._code, self._counts = code, counts

    def __getattr__(self, name):
        return getattr(self._code, name)

    def sp_lightning_step(self, request):
        made: Request = request._obj
        for each in made.tensors[: made.count]:
            widths = {0: 4, 1: 2, 2: 2}
            states = sum(bool(pointer) for pointer in each.state)
            read = 4 + widths[each.grad_type] + 4 * states
            written = 4 + 4 * states + (widths[each.wire_type] if each.wire else 0)
            self._counts["compiled"] += each.count * (read + written)
        return self._code.sp_lightning_step(request)


class Layers(nn.Sequential):
    """Large weights alone."""

    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(4)))


def counted_in(counts, method):
    """Return a method in which torch's operators are counted."""

    def counting(self, *args):
        with Counting(counts):
            method(self, *args)

    return counting


@pytest.fixture
def counts(monkeypatch, arithmetic):
    """Count in the optimizer's thread, on a device with CUDA's arithmetic."""
    counted, code = Counter(), compiled._code()
    monkeypatch.setattr(compiled, "_code", lambda: Code(code, counted))
    monkeypatch.setattr(host_gradient, "ADDED", CHUNK)
    for owner, name in ((Steps, "_step"), (host_gradient.GradientBytes, "_add")):
        monkeypatch.setattr(owner, name, counted_in(counted, getattr(owner, name)))
    return counted


CASES = {
    "unclipped": ({"wire": torch.bfloat16}, {}, False, 1, 28),
    "clipped": ({"wire": torch.bfloat16}, {}, True, 1, 30),
    "fused, as TrainingArguments choose": ({"wire": torch.bfloat16}, {"fused": True}, True, 1, 30),
    "four micro-batches": ({"wire": torch.bfloat16}, {}, True, 4, 30 + 3 * 10),
    "FP32": ({}, {}, True, 1, 36),
    "FP32, four micro-batches": ({}, {}, True, 4, 36 + 3 * 12),
    "master weights": ({"wire": torch.bfloat16, "master_weights": True}, {}, True, 1, 30),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_goes_through_memory_once(counts, case):
    options, optimizer_options, clips, batches, most = CASES[case]
    model, run = Layers(), Run(torch.device("simgpu", 0), True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **optimizer_options)
    is_half = options.get("master_weights", False)
    with stream(model, "simgpu", window=1, units=("Sequential",), chunk=CHUNK, **options) as handle:
        for i in range(3):
            counts.clear()
            for part in range(batches):
                with torch.autocast("simgpu", torch.bfloat16, bool(options) and not is_half, cache_enabled=False):
                    x = run.x(i + 10 * part, 4, 64)
                    loss = model(x.bfloat16() if is_half else x).float().square().mean()
                loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            handle.finish_step()
            optimizer.zero_grad()
        weights = [weight for weight in handle.weights if not weight.unit.is_resident]
    count = sum(weight.host.numel() for weight in weights)
    assert counts["compiled"] and sum(counts.values()) <= most * count, {k: v / count for k, v in counts.items()}

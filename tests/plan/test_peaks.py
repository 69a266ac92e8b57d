"""A planned peak of the device's memory is that of the run, for nets of different kinds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nets import NETS
from often import often

from sp_lightning.handle import Handle
from sp_lightning.options import Options
from sp_lightning.plan import plan
from sp_lightning.plan.model import with_tensors

MIB = 2**20
PRECISIONS = "32-true", "bf16-mixed"
WAYS = [(1, "keep"), (2, "recompute"), (2, "offload"), (3, "recompute+offload")]
ROOT = Path(__file__).parents[2]


def planned(net, window, activations, precision, target):
    options = {"window": window, "transfer": 1, "activations": activations, "precision": precision, "device": target}
    found = plan(net.make, net.batch, loss=net.loss, optimizer="SGD", machine="h200", **options)
    return sum(nbytes for name, nbytes in found.device_terms.items() if name != "reserve")


def measured(net, window, activations, precision, device):
    """Take three steps, and return the most bytes on the device."""
    half = precision == "bf16-mixed"
    options = Options(window=window, transfer=1, activations=activations)
    with Handle(net.make(), device, options, wire=torch.bfloat16 if half else None) as handle:
        optimizer = torch.optim.SGD([p for p in handle.module.parameters() if p.requires_grad], lr=1e-6)
        batch = with_tensors(net.batch(), lambda tensor: tensor.to(device))
        for _ in range(3):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half, cache_enabled=False):
                loss = net.loss(handle.module, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        return handle.stats()["device_peak"]


def is_near(found, run):
    return abs(found - run) <= max(0.02 * run, 16 * MIB)


ON_SIMGPU = [(name, *way) for name in ("blocks", "adapters", "one wide layer") for way in WAYS]


@pytest.mark.simgpu
@pytest.mark.parametrize(("name", "window", "activations"), often(ON_SIMGPU, *ON_SIMGPU[-4:], ON_SIMGPU[2]))
def test_on_the_simulated_device(name, window, activations):
    run = measured(NETS[name], window, activations, "32-true", torch.device("simgpu", 0))
    assert is_near(planned(NETS[name], window, activations, "32-true", "simgpu"), run)


def test_outputs_beside_the_loss_are_gone_before_backward():
    net, options = NETS["llama"], {"optimizer": "SGD", "machine": "h200", "window": 1}
    whole, loss = (plan(net.make, net.batch, loss=what, **options).device_terms for what in (None, net.loss))
    assert whole == loss


RUN = """
import gc, json, sys
import torch
from nets import NETS
from test_peaks import PRECISIONS, WAYS, measured
found = []
for precision in PRECISIONS:
    for window, activations in WAYS:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        found.append(measured(NETS[sys.argv[1]], window, activations, precision, torch.device("cuda", 0)))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_in_the_allocator_of_cuda(name, null_cuda):
    import nullcuda

    environment = nullcuda.environment()
    environment["PYTHONPATH"] += f":{ROOT}:{ROOT / 'tests/rigs'}:{ROOT / 'tests/plan'}"
    done = subprocess.run([sys.executable, "-c", RUN, name], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = iter(json.loads(done.stdout.splitlines()[-1]))
    for precision in PRECISIONS:
        for window, activations in WAYS:
            found, run = planned(NETS[name], window, activations, precision, "cuda"), next(runs)
            assert is_near(found, run), (precision, window, activations, found / MIB, run / MIB)

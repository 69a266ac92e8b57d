"""A run resumes with any other number of devices, under this strategy or in plain Lightning, bit for bit."""

import itertools

import pretended_nodes
import processes
import pytest
import ranked_runs
import torch

import parity

pytestmark = pytest.mark.filterwarnings("ignore")


def run(sizes, sides, folder, optimizer="adamw", case="batch_norm", accelerator="cpu", nodes=None):
    """Train in legs, each from the checkpoint of the one before, three steps long; return the last checkpoint.

    ``nodes``: on how many nodes the ranks of each leg are; by default on one.
    """
    source = None
    for number, (size, side, of) in enumerate(zip(sizes, sides, nodes or [1] * len(sizes), strict=True)):
        target = str(folder / f"{'-'.join(sides)} {number}.ckpt")
        arguments = {"source": source, "target": target, "steps": 3 * (number + 1), "optimizer": optimizer}
        of_leg = (ranked_runs.leg,) if of == 1 else (pretended_nodes.trainer, of, ranked_runs.leg)
        processes.run(size, *of_leg, case, side, **arguments, accelerator=accelerator)
        source = target
    return contents(source)


def contents(path):
    checkpoint = torch.load(path, weights_only=False)
    kept = {
        name: checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    }
    return parity.Record([parity.Entry("at the end", path, leaf) for path, leaf in parity.leaves(kept)])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 2, 4, 1)])
def test_another_number_of_devices_resumes_within_an_epoch(sizes, tmp_path):
    plain = run(sizes, ["plain"] * len(sizes), tmp_path)
    parity.compare(plain, run(sizes, ["streaming"] * len(sizes), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "third"), [("adamw", 2), ("adamw", 1), ("adafactor", 2)])
def test_other_numbers_of_nodes_and_plain_lightning_resume_runs(optimizer, third, tmp_path):
    sizes, nodes = (1, 4, 2, 1), (1, 2, third, 1)  # alone, 2 x 2, 2 x 1 or 1 x 2, plain
    plain = run(sizes, ["plain"] * 4, tmp_path, optimizer)
    sides = ["streaming", "streaming", "streaming", "plain"]
    parity.compare(plain, run(sizes, sides, tmp_path, optimizer, nodes=nodes))


@pytest.mark.parametrize("first", ["plain", pytest.param("streaming", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(one, marks=pytest.mark.slow) for one in ("adafactor", "two"))]
)
def test_plain_lightning_and_the_strategy_resume_each_other(first, optimizer, tmp_path):
    sizes = (1, 2, 2)
    other = {"plain": "streaming", "streaming": "plain"}[first]
    sides = list(itertools.islice(itertools.cycle([first, other]), len(sizes)))
    plain = run(sizes, ["plain"] * len(sizes), tmp_path, optimizer)
    parity.compare(plain, run(sizes, sides, tmp_path, optimizer))


@pytest.mark.simgpu
def test_an_interrupted_run_is_one_that_never_stopped(tmp_path):
    """The sampler gives each rank the same batches in the same order only while their number stays the same.

    Lightning saves no generators: forward draws nothing here.
    """
    whole, middle, end = (str(tmp_path / f"{name}.ckpt") for name in ("whole", "middle", "end"))
    processes.run(2, ranked_runs.leg, "mlp", "plain", None, whole, 6)
    processes.run(2, ranked_runs.leg, "mlp", "streaming", None, middle, 6, accelerator="simgpu", save_after=3)
    processes.run(2, ranked_runs.leg, "mlp", "streaming", middle, end, 6, accelerator="simgpu")
    parity.compare(contents(whole), contents(end))

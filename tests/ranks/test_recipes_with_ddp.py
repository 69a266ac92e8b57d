"""Each recipe's YAML trains on several devices, with the bits of Lightning's own DDP."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import processes
import pytest
import ranked_recipes

import parity

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = pytest.mark.slow
RECIPES = {  # with what makes its first steps do all that it does
    "diffusion": (),
    "distill": ("--model.match=both",),
    "finetune_llm": (),
    "finetune_vision": ("--data.batch_size=4",),
    "finetune_vlm": (),
    "lora_llm": ("--model.dropout=0.3",),
    "moe": (),
    "moefy": (),
    "preference": (),
    "pretrain_small": ("--trainer.val_check_interval=2",),
    "prune": ("--model.every=1", "--model.backward_density=0.2"),
    "pseudo_to_real": ("--model.delink_at=1",),
    "speech": (),
    "sweep": (),
}
NEEDS = {"diffusion": "diffusers", "finetune_vision": "torchvision", "finetune_vlm": "torchvision"}
NEEDS |= dict.fromkeys(["lora_llm", "preference", "sweep"], "peft")
DAILY = {"moe"}


def both(folder, function, *arguments):
    """Run a function of ranked_recipes under DDP and under the strategy; return what each rank did."""
    found = []
    for name, more in (("plain", [ranked_recipes.PLAIN]), ("ours", [])):
        (folder / name).mkdir()
        found.append(processes.run(2, function, str(folder / name), *arguments, *more))
    return found


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=[] if name in DAILY else SLOW) for name in RECIPES])
@pytest.mark.seldom
def test_a_recipe_gives_the_result_of_ddp(recipe, tmp_path):
    pytest.importorskip(NEEDS.get(recipe, "transformers"))
    for rank in zip(*both(tmp_path, ranked_recipes.fit, recipe, *RECIPES[recipe]), strict=True):
        parity.compare(*rank)


@SLOW
@pytest.mark.parametrize("recipe", ["finetune_llm", "lora_llm", "pseudo_to_real"])
def test_a_recipe_goes_on_from_ddps_checkpoint_as_if_it_had_not_stopped(recipe, tmp_path):
    arguments = [*RECIPES[recipe], "--trainer.callbacks+=ranked_recipes.Halfway", ranked_recipes.PLAIN]
    through = processes.run(2, ranked_recipes.fit, str(tmp_path), recipe, *arguments, steps=4)
    (tmp_path / "ours").mkdir()
    half = f"--ckpt_path={tmp_path}/half.ckpt"
    resumed = processes.run(2, ranked_recipes.fit, str(tmp_path / "ours"), recipe, *RECIPES[recipe], half, steps=4)
    for whole, rest in zip(through, resumed, strict=True):
        parity.compare(parity.Record(whole.entries[-len(rest.entries) :]), rest)


@SLOW
def test_answers_are_those_of_ddp_in_the_order_of_the_prompts(tmp_path):
    plain, ours = both(tmp_path, ranked_recipes.answers, "--data.batch_size=3")
    assert plain == ours
    prompts = [
        json.loads(line)["messages"] for line in (tmp_path / "ours/run/tiny/prompts.jsonl").read_text().splitlines()
    ]
    assert [json.loads(line)["messages"] for line in ours[0]] == prompts
    assert [path.name for path in (tmp_path / "ours/run").glob("answers*")] == ["answers.jsonl"]


@SLOW
def test_a_command_line_trains_on_two_devices(tmp_path):
    """In processes that Lightning starts."""
    config = ranked_recipes.ROOT / "examples/finetune_llm/config.yaml"
    trainer = ["--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.max_steps=2"]
    command = [sys.executable, "-m", "sp_lightning", "fit", f"--config={config}", *trainer]
    places = os.pathsep.join([str(ranked_recipes.ROOT), *filter(None, sys.path)])
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": places, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("plain Lightning would have needed") == 1  # the first rank speaks for all
    assert (tmp_path / "runs/finetune_llm/model/model.safetensors").exists()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_share_an_epoch_and_a_resumed_one_goes_on_where_it_was(size, monkeypatch):
    monkeypatch.syspath_prepend(ranked_recipes.ROOT)
    from examples.common.loading import TrainLoader

    def loaders(size):
        trainers = [SimpleNamespace(world_size=size, global_rank=rank, is_last_batch=False) for rank in range(size)]
        return [TrainLoader(trainer, list(range(20)), 2) for trainer in trainers]

    def taken(loaders):
        """What all ranks take, in the order of the epoch."""
        return [int(x) for batches in zip(*loaders, strict=True) for pair in zip(*batches, strict=True) for x in pair]

    order = taken(loaders(1))
    assert sorted(order) == list(range(20))
    assert taken(loaders(size)) == [*order, *order[: -20 % size]]
    begun = loaders(size)
    iterators = [iter(loader) for loader in begun]
    first = [int(x) for pair in zip(*(next(iterator) for iterator in iterators), strict=True) for x in pair]
    for other in (1, 2, 4):
        resumed = loaders(other)
        for loader in resumed:
            loader.load_state_dict(begun[0].state_dict())
        rest = taken(resumed)
        assert [*first, *rest][:20] == order and len(rest) - (20 - len(first)) < other

"""Each recipe's YAML trains on several devices, with the bits of Lightning's own DDP."""

import json
import os
import subprocess
import sys

import processes
import pytest
import ranked_recipes

import parity

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = pytest.mark.slow
RECIPES = ["diffusion", "finetune_llm", "finetune_vision", "finetune_vlm", "lora_llm"]
NEEDS = {"diffusion": "diffusers", "finetune_vision": "torchvision", "finetune_vlm": "torchvision", "lora_llm": "peft"}


def both(folder, function, *arguments):
    """Run a function of ranked_recipes under DDP and under the strategy; return what each rank did."""
    found = []
    for name, more in (("plain", [ranked_recipes.PLAIN]), ("ours", [])):
        (folder / name).mkdir()
        found.append(processes.run(2, function, str(folder / name), *arguments, *more))
    return found


@SLOW
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_gives_the_result_of_ddp(recipe, tmp_path):
    pytest.importorskip(NEEDS.get(recipe, "transformers"))
    for rank in zip(*both(tmp_path, ranked_recipes.fit, recipe), strict=True):
        parity.compare(*rank)


@SLOW
def test_answers_are_those_of_ddp(tmp_path):
    plain, ours = both(tmp_path, ranked_recipes.answers, "--data.batch_size=3")
    prompts = (ranked_recipes.ROOT / "examples/data/prompts.jsonl").read_text().splitlines()
    asked = {json.dumps(json.loads(line)["prompt"]) for rank in ours for line in rank}
    assert plain == ours and asked == {json.dumps(json.loads(line)["prompt"]) for line in prompts}


@SLOW
def test_a_command_line_trains_on_two_devices(tmp_path):
    """In processes that Lightning starts."""
    config = ranked_recipes.ROOT / "examples/finetune_llm/config.yaml"
    trainer = ["--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.max_steps=2"]
    data = f"--data.path={ranked_recipes.ROOT}/examples/data/chats.jsonl"
    command = [sys.executable, "-m", "sp_lightning", "fit", f"--config={config}", data, *trainer]
    places = os.pathsep.join([str(ranked_recipes.ROOT), *filter(None, sys.path)])
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": places, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "runs/finetune_llm/model/model.safetensors").exists()

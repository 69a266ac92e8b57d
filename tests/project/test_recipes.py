"""The recipes under examples/: each runs as its page says, has the plain run's bits, resumes, and exports."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from often import often

import parity
from sp_lightning import cli
from sp_lightning.errors import OptionError

for package in ("transformers", "peft", "torchvision", "diffusers"):
    pytest.importorskip(package)
ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/recipes.md").read_text().replace("\\\n", " ")
COMMANDS = re.findall(r"<!-- ci: recipe -->\n```bash\n(.*)\n```", PAGE)
FOR_REAL = sorted({*re.findall(r"```bash\n(python -m sp_lightning .*?)\n```", PAGE)} - {*COMMANDS})
FITTED = ["finetune_llm", "lora_llm", "finetune_vision", "finetune_vlm", "diffusion"]
SCRIPTS = ["sft", "dpo", "grpo"]
CHATS = ["finetune_llm", "lora_llm"]
SLOW = pytest.mark.slow
PLAIN = "--trainer.strategy=auto"
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


@pytest.fixture(autouse=True)
def in_a_clone(tmp_path, monkeypatch):
    """The recipes where the test runs; what they write stays there too. Nothing is asked of the hub."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "argv", ["sp_lightning"])  # else LightningCLI warns that it was given two command lines
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    used = {name: given for name, given in LightningCLI.subcommands().items() if name in ("fit", "predict")}
    monkeypatch.setattr(LightningCLI, "subcommands", lambda self: used)  # each has a parser, and making it takes long


def run(recipe, *arguments, folder="run", command="fit"):
    """Run a recipe's command line; return where it wrote."""
    cli.main([command, f"--config=examples/{recipe}/config.yaml", f"--trainer.default_root_dir={folder}", *arguments])
    return pathlib.Path(folder)


def fit(recipe, *arguments, folder="run", steps=2):
    return run(recipe, f"--trainer.max_steps={steps}", *QUIET, *arguments, folder=folder)


def checkpoint(folder):
    """Read the checkpoint that a run left."""
    (path,) = folder.glob("lightning_logs/version_*/checkpoints/last.ckpt")
    return torch.load(path, map_location="cpu", weights_only=True)


def left(folder):
    """Record weights and optimizer state as a run left them."""
    names = "state_dict", "optimizer_states", "lr_schedulers", "global_step"
    kept = {name: value for name, value in checkpoint(folder).items() if name in names}
    return parity.Record([parity.Entry("at the end", path, leaf) for path, leaf in parity.leaves(kept)])


def trained(folder):
    """Return the weights that a run left, by their names in the model of its module."""
    return {name.partition(".")[2]: value for name, value in checkpoint(folder)["state_dict"].items()}


# --- What the page says


def test_the_page_has_the_command_of_every_recipe():
    folders = {path.parent.name for path in (ROOT / "examples").glob("*/config.yaml")}
    scripts = {path.stem for path in (ROOT / "examples/hf").glob("*.yaml")}
    assert folders == {*FITTED, "predict"} and scripts == {*SCRIPTS}
    fits = {f"python -m sp_lightning fit --config examples/{name}/config.yaml" for name in FITTED}
    predicts = "python -m sp_lightning predict --config examples/predict/config.yaml"
    launch = "python -m sp_lightning launch --activations recompute --"
    launches = {f"{launch} -m examples.hf.{name} --config examples/hf/{name}.yaml" for name in SCRIPTS}
    assert {*COMMANDS} == {*fits, predicts, *launches, "python -m examples.by_hand"}


@pytest.mark.parametrize("command", often(FOR_REAL))
def test_a_command_for_a_real_model_has_known_arguments(command, capsys):
    """It is read, not run: its model is large."""
    words = shlex.split(command)
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words[3:], "--print_config"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in words if word.endswith(".jsonl") or "meta-llama/" in word)


@SLOW
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs_as_it_is(command):
    done = process(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr[-3000:]


def process(*arguments):
    """Run Python in a process of its own, with one thread."""
    places = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=500)


# --- Bits


@pytest.mark.parametrize("recipe", often(FITTED, "lora_llm"))
def test_a_recipe_has_the_plain_runs_bits(recipe):
    streamed = fit(recipe, folder="streamed")
    parity.compare(left(fit(recipe, PLAIN, folder="plain")), left(streamed))


@SLOW
@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_beside_packed_weights_have_the_plain_runs_bits(bits):
    pytest.importorskip("torchao")
    streamed = fit("lora_llm", f"--model.base_bits={bits}", folder="streamed")
    parity.compare(left(fit("lora_llm", f"--model.base_bits={bits}", PLAIN, folder="plain")), left(streamed))


@SLOW
@pytest.mark.simgpu
@pytest.mark.parametrize("recipe", FITTED)
def test_a_recipe_has_the_plain_runs_bits_on_a_device(recipe):
    importlib.import_module("simgpu.lightning")
    on = ["--trainer.accelerator=simgpu", "--trainer.strategy=SingleDeviceStrategy"]
    plain = fit(recipe, *on, "--trainer.strategy.device=simgpu:0", folder="plain")
    parity.compare(left(plain), left(fit(recipe, on[0], folder="streamed")))


@SLOW
@pytest.mark.parametrize("recipe", CHATS)
def test_a_recipe_has_the_bits_of_ddp_on_two_devices(recipe):
    """In processes that Lightning starts."""
    command = ["-m", "sp_lightning", "fit", f"--config=examples/{recipe}/config.yaml", "--trainer.max_steps=2", *QUIET]
    for folder, strategy in (("plain", ["--trainer.strategy=ddp_find_unused_parameters_true"]), ("streamed", [])):
        done = process(*command, "--trainer.devices=2", f"--trainer.default_root_dir={folder}", *strategy)
        assert done.returncode == 0, done.stderr[-3000:]
    parity.compare(left(pathlib.Path("plain")), left(pathlib.Path("streamed")))


class AfterOneEpoch(L.Callback):
    """Saves a checkpoint."""

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint("half.ckpt")


@SLOW
@pytest.mark.parametrize("recipe", FITTED)
def test_a_recipe_resumes_from_a_plain_checkpoint(recipe):
    epochs = "--trainer.max_epochs=2", "--trainer.limit_train_batches=2"
    saving = "--trainer.callbacks+=test_recipes.AfterOneEpoch"
    through = fit(recipe, PLAIN, *epochs, saving, folder="through", steps=-1)
    resumed = fit(recipe, *epochs, "--ckpt_path=half.ckpt", folder="resumed", steps=-1)
    if recipe in CHATS:  # nothing else draws random numbers
        parity.compare(left(through), left(resumed))
    plain = fit(recipe, PLAIN, *epochs, "--ckpt_path=half.ckpt", folder="plain", steps=-1)
    parity.compare(left(plain), left(resumed))


@SLOW
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_trl_has_the_plain_runs_bits(name):
    from safetensors.torch import load_file

    pytest.importorskip("trl")
    script = ["-m", f"examples.hf.{name}", "--config", f"examples/hf/{name}.yaml", "--output_dir"]
    launch = ["-m", "sp_lightning", "launch", "--window", "1", "--activations", "recompute", "--"]
    for words in ([*script, "plain"], [*launch, *script, "streamed"]):
        done = process(*words)
        assert done.returncode == 0, done.stderr[-3000:]
    plain, streamed = (load_file(f"{folder}/adapter_model.safetensors") for folder in ("plain", "streamed"))
    assert plain.keys() == streamed.keys() and all(torch.equal(plain[name], streamed[name]) for name in plain)


def test_a_loop_by_hand_has_the_plain_runs_bits(monkeypatch, capsys):
    from safetensors.torch import load_file

    from examples import by_hand

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)

    def exported(folder):
        monkeypatch.setattr(sys, "argv", ["by_hand", "--steps=3", f"--export={folder}"])
        by_hand.main()
        return load_file(f"{folder}/model.safetensors")

    streamed = exported("streamed")
    monkeypatch.setattr(by_hand.sp_lightning, "stream", lambda *_, **__: contextlib.nullcontext())
    plain = exported("plain")
    assert (
        all(torch.equal(plain[name], streamed[name]) for name in plain) and capsys.readouterr().out.count("loss") == 6
    )


# --- What is exported


@pytest.mark.parametrize(
    "recipe, kind",
    [
        ("finetune_llm", "AutoModelForCausalLM"),
        pytest.param("finetune_vision", "AutoModelForImageClassification", marks=SLOW),
        pytest.param("finetune_vlm", "AutoModelForImageTextToText", marks=SLOW),
    ],
)
def test_transformers_reads_what_is_exported(recipe, kind):
    import transformers

    folder = fit(recipe)
    model = getattr(transformers, kind).from_pretrained(folder / "model")
    processor = transformers.AutoImageProcessor if recipe == "finetune_vision" else transformers.AutoTokenizer
    assert processor.from_pretrained(folder / "model") is not None
    expected, found = trained(folder), model.state_dict()
    assert len(expected) > 10 and all(torch.equal(found[name], value) for name, value in expected.items())


def test_peft_and_transformers_read_adapters_and_a_merged_model():
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = fit("lora_llm", "--model.merge=true")
    base = AutoModelForCausalLM.from_pretrained("runs/tiny/llama")
    untrained = {name: value.clone() for name, value in base.state_dict().items()}
    expected = PeftModel.from_pretrained(base, folder / "adapters").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").state_dict()
    assert merged.keys() == expected.keys() and all(torch.equal(merged[name], expected[name]) for name in merged)
    changed = {name for name in merged if not torch.equal(merged[name], untrained[name])}
    assert len(changed) == 4 * 7 and all("_proj" in name for name in changed)


def test_adapters_cannot_be_merged_into_packed_weights():
    from examples.lora_llm.module import LoraLLM

    with pytest.raises(ValueError, match="leave base_bits out"):
        LoraLLM(base_bits=8, merge=True)


@SLOW
def test_diffusers_reads_the_adapters():
    from diffusers import SD3Transformer2DModel

    folder = fit("diffusion")
    model = SD3Transformer2DModel.from_pretrained("runs/tiny/sd3", subfolder="transformer")
    model.load_lora_adapter(folder / "model", prefix=None, use_safetensors=True)
    expected, found = trained(folder), model.state_dict()
    assert expected and all("lora" in name for name in expected)
    read = {name.replace(".default.", ".default_0."): value for name, value in expected.items()}
    assert all(torch.equal(found[name], value) for name, value in read.items())


# --- Answers


def answers(*arguments, folder):
    path = run("predict", *QUIET, *arguments, folder=folder, command="predict") / "answers.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_those_of_the_plain_run():
    streamed, plain = answers(folder="streamed"), answers(PLAIN, folder="plain")
    asked = [json.loads(line) for line in (ROOT / "examples/data/prompts.jsonl").read_text().splitlines()]
    key = {json.dumps(record["prompt"]): record["answer"] for record in asked}
    assert streamed == plain and {json.dumps(one["prompt"]): one["answer"] for one in streamed} == key
    assert any(one["completion"] for one in streamed)


@SLOW
def test_a_model_answers_with_the_adapters_that_were_trained():
    adapters = fit("lora_llm", steps=5, folder="trained") / "adapters"
    given = f"--model.adapters={adapters}"
    streamed, plain = answers(given, folder="streamed"), answers(PLAIN, given, folder="plain")
    assert streamed == plain and streamed != answers(folder="without")


def test_each_process_of_a_group_makes_a_whole_tiny_model(monkeypatch):
    from examples.common import tiny

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    assert pathlib.Path(tiny.language_model(), "model.safetensors").exists()


# --- Chats in blocks


@pytest.fixture
def words():
    from transformers import AutoTokenizer

    from examples.common import tiny

    return AutoTokenizer.from_pretrained(tiny.language_model())


def ask(text):
    return {"role": "user", "content": text}


def say(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "record, learned",
    [
        ({"messages": [ask("one?"), say("two"), ask("three?"), say("four")]}, ["two</s>", "four</s>"]),
        ({"messages": [ask("one?")]}, []),
        ({"instruction": "add", "input": "1, 2", "output": "three"}, ["three</s>"]),
        ({"instruction": "add 1 and 2", "output": "three"}, ["three</s>"]),
        ({"prompt": "one", "completion": " two"}, [" two</s>"]),
        ({"text": "one two"}, ["one two</s>"]),
    ],
)
def test_of_a_record_the_answers_are_learned(record, learned, words):
    from examples.common.chats import IGNORED, documents

    found = list(documents(record, words, 64))
    assert [words.decode([label for label in labels if label != IGNORED]) for _, labels in found] == learned
    assert all(
        label in (IGNORED, token) for tokens, labels in found for token, label in zip(tokens, labels, strict=True)
    )


def test_a_record_of_another_kind_is_named(words):
    from examples.common.chats import ChatData

    path = pathlib.Path("my.jsonl")
    path.write_text('{"text": "a"}\n{"question": "b"}\n')
    data = ChatData("my.jsonl")
    data.tokenizer = words
    with pytest.raises(OptionError, match=r"data.path must be records of messages .*'question'.* in record 2 of my"):
        data.blocks("my.jsonl")
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(OptionError, match="answers to learn within block_size=128 tokens, got"):
        data.blocks("my.jsonl")


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text", "Mistral"])
def test_packed_documents_do_not_see_each_other(family):
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, head_dim=16, num_hidden_layers=2, vocab_size=50)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    tokens, positions = torch.arange(3, 19)[None], torch.arange(8).repeat(2)[None]
    with torch.no_grad():
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        alone = model(input_ids=tokens[:, 8:], position_ids=positions[:, 8:], use_cache=False).logits
    torch.testing.assert_close(packed[:, 8:], alone)


# --- Plans


@SLOW
@pytest.mark.parametrize(
    ("recipe", "said"),
    [("lora_llm", ": fits"), ("finetune_llm", ": fits"), ("predict", "model must be a module with a training_step")],
)
def test_a_recipe_is_planned_without_weights(recipe, said, capsys):
    from examples.common import tiny

    pathlib.Path(tiny.language_model(), "model.safetensors").unlink()
    config = f"--config=examples/{recipe}/config.yaml"
    with contextlib.suppress(SystemExit):
        cli.main(["plan", config, "--machine", "rtx4070"])
    assert said in "".join(capsys.readouterr())


@SLOW
@pytest.mark.parametrize("recipe", ["finetune_vlm", "diffusion", "lora_llm --model.base_bits=4"])
def test_a_recipe_of_pictures_or_of_packed_weights_is_planned(recipe, capsys):
    name, *more = recipe.split()
    with contextlib.suppress(SystemExit):
        cli.main(["plan", f"--config=examples/{name}/config.yaml", "--machine", "rtx4070", *more])
    assert ": fits" in capsys.readouterr().out

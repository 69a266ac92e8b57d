"""``python -m sp_lightning plan -- SCRIPT``: a script runs to its first training step, which is planned."""

from __future__ import annotations

import contextlib
import json
import pathlib
import runpy
import sys
import textwrap
import types

import pytest
import torch
from hf_runs import llama, tokenizer, transformers

from sp_lightning import plan
from sp_lightning.cli import main
from sp_lightning.hf import streaming
from sp_lightning.memory.partition import partition
from sp_lightning.memory.watched_parameters import is_watched

TRAINER = """
    import argparse

    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="base")
    given, others = parser.parse_known_args()
    model = AutoModelForCausalLM.from_pretrained(given.config, dtype=torch.float32)
    rows = [{"input_ids": (ids := torch.randint(64, (64,))), "labels": ids} for _ in range(40)]
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    arguments |= {"report_to": [], "bf16": "--bf16" in others, "fp16": "--fp16" in others}
    arguments |= {"optim": "sgd" if "--sgd" in others else "adamw_torch", "save_strategy": "no"}
    arguments |= {"gradient_checkpointing": "--checkpointing" in others, "disable_tqdm": True}
    arguments |= {"eval_strategy": "epoch"} if "--evaluating" in others else {}
    trainer = Trainer(model, TrainingArguments("out", **arguments), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    open("trained", "w")
"""
TRL = """
    import sys

    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind, *peft = sys.argv[1:]
    given = {"model": AutoModelForCausalLM.from_pretrained("base")}
    given["train_dataset"] = datasets.load_dataset("data")["train"]
    if kind == "DPO":
        given["ref_model"] = AutoModelForCausalLM.from_pretrained("base")
    if kind == "GRPO":
        given["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    if peft:
        from peft import LoraConfig
        given["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    sizes = {"num_generations": 4, "max_completion_length": 4} if kind == "GRPO" else {"max_length": 16}
    arguments = getattr(trl, kind + "Config")("out", per_device_train_batch_size=4, report_to=[], bf16=True, **sizes)
    words = AutoTokenizer.from_pretrained("base")
    getattr(trl, kind + "Trainer")(args=arguments, processing_class=words, **given).train()
"""
GRPO = """
    import argparse

    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    words = AutoTokenizer.from_pretrained("base")
    judge = AutoModelForSequenceClassification.from_pretrained("judge", num_labels=1, dtype="float32")
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": given.tokens}
    sizes |= {"generation_kwargs": {"min_new_tokens": given.tokens}, "steps_per_generation": given.each}
    arguments = trl.GRPOConfig(
        "out", **sizes, beta=0.0 if given.alone else 0.1, max_steps=2, bf16=given.bf16, report_to=[], disable_tqdm=True,
        gradient_checkpointing=False, save_strategy="no",
    )
    trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained("base", dtype="float32"),
        args=arguments,
        train_dataset=datasets.load_dataset("data")["train"],
        processing_class=words,
        reward_funcs=(lambda completions, **_: [1.0] * len(completions)) if given.alone else judge,
        reward_processing_classes=None if given.alone else words,
    ).train()
    open("trained", "w")
"""
PACKED = """
    import sys

    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    kind = sys.argv[1]
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig
        packing = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        packing = transformers.BitsAndBytesConfig(load_in_4bit=kind == "4", load_in_8bit=kind == "8")
    packed = {"quantization_config": packing, "dtype": torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_pretrained("base", **packed)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    rows = [{"input_ids": (ids := torch.randint(64, (64,))), "labels": ids} for _ in range(8)]
    settings = {"per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "no"}
    arguments = transformers.TrainingArguments("out", **settings, report_to=[], disable_tqdm=True)
    transformers.Trainer(model, arguments, train_dataset=rows).train()
"""
LOOP = """
    import accelerate
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    run = accelerate.Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)
    encoder = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    encoder.to(run.device, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("base"))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader = torch.utils.data.DataLoader([torch.randn(8, 64) for _ in range(16)], batch_size=2)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for batch in loader:
        with torch.no_grad():
            hidden = encoder(batch.to(torch.bfloat16))
        run.backward(model(inputs_embeds=hidden.float()).logits.square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A model without weights, a tokenizer, data of 300 rows, and the scripts."""
    for name, text in {"trainer": TRAINER, "trainer_of_trl": TRL, "grpo": GRPO, "packed": PACKED, "loop": LOOP}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    model = llama(head_dim=8)
    model.config.hidden_size, model.config.intermediate_size = 64, 128
    model.config.architectures = [type(model).__name__]  # by which TRL loads a reference
    model.config.save_pretrained("base")
    monkeypatch.setattr(sys, "argv", ["sp_lightning"])
    return tmp_path


@pytest.fixture
def planned_before(folder):
    """The first plan of a process counts one FP32 number more in a step, whatever it is of."""
    expected()


def data(kind="SFT", rows=300):
    row = {"text": "w1 w2 w3 w4 w5"}
    row = {"prompt": "w1 w2", "chosen": " w3 w4", "rejected": " w5 w6"} if kind != "SFT" else row
    pathlib.Path("data").mkdir()
    pathlib.Path("data/train.jsonl").write_text((json.dumps(row) + "\n") * rows)
    tokenizer().save_pretrained("base")


def planned(*arguments, status=0):
    """What the command finds, as JSON."""
    own = ["plan", "--machine", "rtx4070", "--json", "found.json", *arguments]
    with pytest.raises(SystemExit) as ended:
        main(own)
    assert ended.value.code == status
    return json.loads(pathlib.Path("found.json").read_text()) if not status else None


def expected(batch=4, tokens=64, **given):
    ids = torch.ones(batch, tokens, dtype=torch.long)
    config = transformers.AutoConfig.from_pretrained("base")
    config.use_cache = False  # as the Trainer sets it
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    batch = {"input_ids": ids, "labels": ids}
    return plan(made, batch, loss=_loss, machine="rtx4070", clip=True, **given).to_dict()  # by default a Trainer does


def _loss(module, batch):
    return module(**batch).loss  # and the logits are gone


def same(found, other):
    for name in ("device_terms", "host", "window", "precision", "step_s"):
        assert found[name] == other[name], name


@pytest.mark.seldom
def test_a_trainers_first_step_is_planned_from_the_config_alone(capsys, planned_before):
    """There are no weights in the folder, nothing is trained, and the steps are those of three epochs."""
    found = planned("--", "trainer.py", "--bf16", "--evaluating")
    assert "Not measured: evaluation, whose batches have 8 rows" in capsys.readouterr().out
    same(found, expected(precision="bf16-mixed", accumulate=2))
    assert found["model"] == "LlamaForCausalLM" and found["run"]["steps"] == 15
    assert not pathlib.Path("trained").exists()
    assert transformers.Trainer.train.__module__ == "transformers.trainer"  # no patch is left
    assert not torch.nn.Linear(2, 2).weight.is_meta


@pytest.mark.slow
def test_a_scripts_settings_and_those_of_plan_are_obeyed(planned_before):
    found = planned("--window", "1", "--seq", "96", "--", "trainer.py", "--fp16", "--sgd")
    same(found, expected(tokens=96, precision="16-mixed", accumulate=2, window=1, optimizer="SGD"))
    less = planned("--window", "1", "--seq", "96", "--", "trainer.py", "--fp16", "--sgd", "--checkpointing")
    assert less["device_terms"]["kept for backward"] < found["device_terms"]["kept for backward"] / 2
    module = planned("--", "-m", "trainer")
    same(module, expected(accumulate=2))


@pytest.mark.seldom
def test_trls_first_step_is_planned_and_of_the_data_the_first_rows_are_read(capfd):
    pytest.importorskip("trl")
    data()
    found = planned("--", "trainer_of_trl.py", "SFT")
    assert found["rows"] == 4 and "steps" not in found["run"]  # how many rows there are is not known
    assert "Map: 100%" not in capfd.readouterr().err or "300" not in capfd.readouterr().err
    assert planned("--samples", "300", "--", "trainer_of_trl.py", "SFT")["run"]["steps"] == 75


@pytest.mark.slow
def test_a_reference_streams_through_a_window_of_its_own(capsys):
    pytest.importorskip("trl")
    data("DPO")
    found = planned("--window", "1", "--", "trainer_of_trl.py", "DPO")
    one = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(_config()).parameters())
    assert found["parameters"] == 2 * one and found["trained"] == one and found["rows"] == 8
    units = partition(transformers.AutoModelForCausalLM.from_config(_config(), dtype=torch.float32))
    assert found["device_terms"]["window"] == 2 * max(unit.nbytes for unit in units if not unit.resident)


@pytest.mark.seldom
def test_answers_are_planned_as_often_as_they_are_made_and_not_trained(capsys):
    """Twice the tokens take twice the time before the step, and a batch of which each is used twice half of it."""
    pytest.importorskip("trl")
    data("GRPO")
    _judge()
    found, longer, shared = (
        planned("--window", "1", "--", "grpo.py", *given)
        for given in (("--tokens", "64"), ("--tokens", "128"), ("--tokens", "64", "--each", "2"))
    )
    said = capsys.readouterr().out
    assert "of that, generating answers and scoring them" in said and "as long as they may be" in said
    one = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(_config()).parameters())
    assert 2 * one < found["parameters"] < 3 * one and found["trained"] == one and found["rows"] == 4
    passes = found["before_s"] / found["simulation"]["step_s"]
    assert longer["before_s"] == pytest.approx(2 * found["before_s"], rel=0.1) and 4 < passes < 64
    # TRL scores answers that it uses again once more than the others.
    assert 0.5 < shared["before_s"] / found["before_s"] < 0.65
    assert found["step_s"] == found["before_s"] + found["simulation"]["step_s"] and found["largest_batch"] > 4
    assert longer["device_terms"]["kept for backward"] > 1.5 * found["device_terms"]["kept for backward"]


@pytest.mark.seldom
def test_a_loops_first_call_is_planned_and_models_that_ran_before_it(capsys):
    found = planned("--", "loop.py")
    one = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(_config()).parameters())
    assert found["parameters"] == one + 4 * (64 * 64 + 64) and found["trained"] == one
    assert found["precision"] == "16-mixed" and found["accumulate"] == 4 and found["rows"] == 2
    assert "the first call of LlamaForCausalLM was measured" in capsys.readouterr().out


def _config():
    return transformers.AutoConfig.from_pretrained("base")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--batch", "2", "--", "trainer.py"], "batch must be left out before --, as the script says it"),
        (["--divide-state", "--", "trainer.py"], "divide_state must be left out before --, as sp_lightning.hf has no"),
        (["--", "gone.py"], "the script must be a file, or -m and a module, got 'gone.py'"),
        (
            ["--", "ends.py"],
            "one that calls Trainer.train, or a model that it moved or prepared, with gradients, got 'one that ended",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, said, capsys):
    pathlib.Path("ends.py").write_text("print('nothing')")
    planned(*arguments, status=2)
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.seldom
@pytest.mark.parametrize("device", [pytest.param("simgpu", marks=pytest.mark.simgpu)], indirect=True)
def test_the_bytes_of_a_script_with_a_quantised_base_are_the_planned_ones(device):
    for library in ("peft", "torchao"):
        pytest.importorskip(library)
    if not _trains_on_torchao():
        pytest.skip(f"transformers {transformers.__version__} trains nothing on a base of this version of torchao")
    config = _large()
    found = planned("--window", "2", "--", "packed.py", "torchao")
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("base")
    with _running("packed.py", "torchao") as run:
        (handle,) = run.stream.handles
        weights = sum(weight.nbytes for unit in handle.units for _, weight in unit.params)
    assert found["host"]["weights"] == pytest.approx(weights, rel=0.05)
    assert weights < sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters()) * 1.3
    wanted = sum(nbytes for name, nbytes in found["device_terms"].items() if name != "reserve")
    assert wanted == pytest.approx(run.peak, rel=0.05)


def _trains_on_torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    return transformers.quantizers.AutoHfQuantizer.from_config(config, pre_quantized=False).is_trainable


@pytest.mark.parametrize("kind", ["4", "8"])
def test_a_base_of_bitsandbytes_is_refused_as_its_run_on_an_accelerator_is(kind, capsys):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    planned("--", "packed.py", kind, status=1)
    assert "as torchao packs them, and bitsandbytes here is another library" in capsys.readouterr().err


@pytest.mark.parametrize("read", ["args[0]", "model.model.layers[2].input_layernorm.weight"])
def test_a_model_that_depends_on_values_is_refused(read, capsys):
    """There are no weights from which to compute them, and memory where a weight would be has none."""
    depends = f"model.model.layers[2].register_forward_pre_hook(lambda _, args: {read}.sum().item() and None)"
    script = textwrap.dedent(TRAINER)
    made = script.index("rows = ")
    pathlib.Path("trainer.py").write_text(f"{script[:made]}{depends}\n{script[made:]}")
    planned("--", "trainer.py", status=2)
    assert "and there are no weights to compute them from" in capsys.readouterr().err


@pytest.mark.parametrize("reads", ["model.save_pretrained('saved')", "model.lm_head.weight.sum().item()"])
def test_a_script_that_reads_weights_before_it_trains_is_refused(reads, capsys):
    script = textwrap.dedent(TRAINER)
    made = script.index("rows = ")
    pathlib.Path("trainer.py").write_text(f"{script[:made]}{reads}\n{script[made:]}")
    planned("--", "trainer.py", status=1)
    assert "the script saves weights or reads their values before" in capsys.readouterr().err


def _judge():
    config = _config()
    config.num_labels = 1
    config.save_pretrained("judge")
    transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained("judge")


def _large():
    """A model whose bytes are mostly those of its layers; without weights."""
    config = _config()
    config.update({"hidden_size": 256, "intermediate_size": 1024, "head_dim": 128, "num_hidden_layers": 6})
    config.update({"max_position_embeddings": 512})
    config.save_pretrained("base")
    return config


@contextlib.contextmanager
def _running(name, *given, **options):
    """Run a script whose models stream, and count the peak on the device."""
    run, accelerator = types.SimpleNamespace(peak=0), torch.accelerator
    has_device = accelerator.is_available()
    before, argv = 0, sys.argv
    if has_device:
        accelerator.reset_peak_memory_stats()
        before = accelerator.memory_allocated()
    sys.argv = [name, *given]
    with streaming(window=2, **options) as run.stream:
        runpy.run_path(name, run_name="__main__")
        run.peak = accelerator.max_memory_allocated() - before if has_device else 0
        yield run
    sys.argv = argv


SCRIPTS = {
    "a Trainer": (["trainer.py"], {}),
    "DPO": (["trainer_of_trl.py", "DPO"], {}),
    "GRPO": (["grpo.py"], {}),
    "GRPO in bf16": (["grpo.py", "--tokens", "32", "--bf16"], {}),
    "GRPO of long answers": (["grpo.py", "--tokens", "160", "--each", "16", "--alone"], {"activations": "recompute"}),
    "GRPO without other models": (["grpo.py", "--alone", "--bf16"], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("simgpu", marks=pytest.mark.simgpu)], indirect=True)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_device_peak_of_a_script_is_the_planned_one(script, device):
    """All models stream: of GRPO with a reference and a judge, while answers are generated, too."""
    pytest.importorskip("trl")
    config = _large()
    (name, *given), options = SCRIPTS[script]
    data(given[0] if name == "trainer_of_trl.py" else "GRPO")
    _judge()
    own = [f"--{option}={value}" for option, value in options.items()]
    found = planned("--window", "2", *own, "--", name, *given)
    assert not pathlib.Path("trained").exists()
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("base")
    with _running(name, *given, **options) as run:
        models = 3 if name == "grpo.py" and "--alone" not in given else 1 + ("DPO" in given)
        assert len(run.stream.handles) == models
    wanted = sum(nbytes for name, nbytes in found["device_terms"].items() if name != "reserve")
    assert wanted == pytest.approx(run.peak, rel=0.05)
    assert ("keys and values" in found["device_terms"]) is (script == "GRPO of long answers")  # when the peak is
    assert all(nbytes >= 0 for nbytes in found["device_terms"].values())


def test_streaming_is_not_begun():
    planned("--", "trainer.py")
    assert not is_watched(torch.nn.Linear(2, 2).weight)

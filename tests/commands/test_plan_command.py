"""``python -m sp_lightning plan``: what it prints, what it draws, which models it finds, and what it refuses."""

import argparse
import contextlib
import json
import pathlib
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sp_lightning import cli
from sp_lightning.commands import model_spec, plan_plot
from sp_lightning.commands import plan as command
from sp_lightning.errors import MissingExtraError, OptionError
from sp_lightning.observe import progress
from sp_lightning.planning.shapes import SHAPES

README = pathlib.Path(__file__).parents[2] / "README.md"

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "dtype": "bfloat16",
}
VIT = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32}
VIT |= {"architectures": ["ViTForImageClassification"], "intermediate_size": 64, "patch_size": 16}
T5 = {"model_type": "t5", "vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}

RESNET = {
    "model_type": "resnet",
    "architectures": ["ResNetForImageClassification"],
    "depths": [1, 1],
    "num_channels": 3,
}
RESNET |= {"hidden_sizes": [8, 16], "embedding_size": 8}
PEGASUS = {"model_type": "pegasus", "d_model": 32, "vocab_size": 64, "encoder_layers": 2, "decoder_layers": 2}
PEGASUS |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "is_encoder_decoder": True}
WHISPER = {"model_type": "whisper", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "is_encoder_decoder": True}


def tower():
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)))


def rows_of_32(rows, length):
    return torch.zeros(rows, 32)


@pytest.fixture
def llama(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "tiny")


def run(*arguments, status=0):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *map(str, arguments)])
    assert stopped.value.code == status


def of_this_file(*arguments):
    given = ("--model", "test_plan_command:tower", "--data", "test_plan_command:rows_of_32", "--machine", "rtx4090")
    return (*given, *arguments)


def test_it_prints_memory_time_windows_and_what_to_change(llama, capsys):
    run("--model", llama, "--batch", 4, "--seq", 64, "--machine", "rtx4090", "--device-memory", "2GiB")
    said = capsys.readouterr().out
    assert "tiny: 181e3 parameters, batch of 4 rows, bf16-mixed, activations 'keep'" in said
    for words in ("window", "resident root", "kept for backward", "optimizer", "lower bound", "chosen", "Change first"):
        assert words in said
    assert "largest batch that fits" in said and ": fits" in said


def test_what_does_not_fit_is_said_and_is_the_exit_status(capsys):
    run(*of_this_file("--device-memory", "1MiB"), status=1)
    said = capsys.readouterr().out
    assert "DOES NOT FIT" in said and "Change first: no window, policy or batch that was tried fits" in said


def test_json_has_everything(capsys):
    run(*of_this_file("--json", "--window", 2, "--transfer", 1))
    found = json.loads(capsys.readouterr().out)
    assert (found["window"], found["transfer"], found["machine"]["name"], found["rows"]) == (2, 1, "rtx4090", 1)
    assert found["device_nbytes"] == sum(found["device_terms"].values())


def test_the_picture_shows_the_chosen_point_and_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    run(*of_this_file("--plot", tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    from sp_lightning.planning import plan

    drawn = plan_plot.figure(plan(tower, torch.zeros(4, 32), machine="rtx4090")).axes[0]
    assert any(text.get_text().startswith("chosen: window") for text in drawn.texts)
    assert "device memory" in [line.get_label() for line in drawn.lines]


def test_a_picture_without_matplotlib_names_the_extra_before_any_work(monkeypatch, capsys):
    monkeypatch.setattr(plan_plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"a picture of a plan needs matplotlib.*sp-lightning\[plots\]"):
        plan_plot.check_matplotlib()
    run(*of_this_file("--plot", "plan.png"), status=2)
    assert capsys.readouterr().out == ""


def test_the_simulated_step_is_written_as_a_timeline(tmp_path):
    run(*of_this_file("--timeline", tmp_path / "trace.json"))
    from sp_lightning.observe import timeline

    assert timeline.load(tmp_path / "trace.json").source == "simulated"


def test_how_long_a_plan_takes_is_shown_while_it_is_made(monkeypatch):
    shown = []
    monkeypatch.setattr(progress, "working", lambda what: shown.append(what) or contextlib.nullcontext())
    run(*of_this_file())
    assert shown == ["planning"]


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch 2.15 computes it")
@pytest.mark.parametrize("model", ["llama-tiny", "llama3-8b"])
@pytest.mark.seldom
def test_a_loss_in_chunks_is_planned_for_models_by_name(model, capsys):
    def planned(loss):
        run("--model", model, *"--machine h200 --activations recompute --batch 8 --seq 512 --json --loss".split(), loss)
        return json.loads(capsys.readouterr().out)

    full, chunked = planned("full"), planned("chunked")
    assert chunked["device_nbytes"] < full["device_nbytes"] and chunked["largest_batch"] > full["largest_batch"]
    run(*of_this_file("--loss", "chunked"), status=2)
    assert "must be 'full': the loss of test_plan_command:tower is more than the cross" in capsys.readouterr().err


def test_its_options_are_listed(capsys):
    run("--help")
    assert "--device-memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "config, name, keys",
    [
        (LLAMA, "LlamaForCausalLM", {"input_ids", "labels"}),
        (VIT, "ViTForImageClassification", {"pixel_values", "labels"}),
        (T5, "T5ForConditionalGeneration", {"input_ids", "labels"}),
        (BERT, "BertForMaskedLM", {"input_ids", "labels"}),
        (RESNET, "ResNetForImageClassification", {"pixel_values", "labels"}),
        (PEGASUS, "PegasusForConditionalGeneration", {"input_ids", "labels"}),
    ],
)
@pytest.mark.few(5)
def test_a_config_is_enough_to_make_a_model_and_its_batch(config, name, keys, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "some.json").write_text(json.dumps(config))
    spec = model_spec.find(str(tmp_path / "some.json"), 2, 8 if "input_ids" in keys else None)
    net = spec.model()
    assert (type(net).__name__, set(spec.batch), net.dtype) == (name, keys, torch.float32)
    assert net(**spec.batch).loss.requires_grad


@pytest.mark.parametrize("name", ["resnet18", "torchvision:resnet18"])
@pytest.mark.few(1)
def test_a_torchvision_name_is_a_classifier_with_images(name):
    pytest.importorskip("torchvision")
    spec = model_spec.find(name, 2)
    assert spec.batch[0].shape == (2, 3, 224, 224)
    assert spec.loss(spec.model(), spec.batch).dim() == 0


@pytest.mark.parametrize(
    "name, length, tokens", [("llama-tiny", 8, 8), ("llama-tiny", None, 64), ("vit-tiny", None, 17)]
)
def test_a_shape_of_the_benchmarks_has_a_length_of_its_own(name, length, tokens):
    pytest.importorskip("transformers")
    spec, shape = model_spec.find(name, 2, length), SHAPES[name]
    assert spec.batch.keys() == shape.inputs(2, tokens, torch.Generator()).keys()
    assert {tuple(t.shape) for t in spec.batch.values() if t.dim() == 2} <= {(2, tokens)}
    assert spec.loss is None and spec.model()(**spec.batch).requires_grad


def test_a_shape_refuses_a_length_that_it_can_not_have():
    with pytest.raises(OptionError, match="seq must be 17 for this model: patches and a class, got 9"):
        model_spec.find("vit-tiny", 2, 9)


def test_a_shape_takes_a_batch_of_the_users():
    spec = model_spec.find("tiny", 3, 8, "test_plan_command:tokens")
    assert spec.batch["tokens"].shape == (3, 9)
    assert spec.loss is None and spec.model()(**spec.batch).requires_grad


# Options, for each kind of model

KINDS = {
    "listed": "vit-h",
    "listed without a shape": "mixtral-8x7b",
    "shape": "llama-tiny",
    "config": "{llama}",
    "torchvision": "torchvision:vit_b_32",
    "function": "test_plan_command:tower",
}
# A value of each option that differs from the default, and what any kind of model may refuse by the option's name.
VALUES = {
    "config": None,  # another way to say what a model is: test_fit_config.py
    "model": None,  # the kind itself
    "batch": ["3"],
    "seq": ["40"],
    "data": ["test_plan_command:{data}"],
    "loss": ["test_plan_command:{loss}"],
    "answer": ["5"],
    "cache": ["host", "--answer", "5"],
    "inference": ["--answer", "5"],
    "at_once": ["2", "--inference"],
    "guessed": ["999", "--inference"],  # few cost nothing where the time is that in which the weights are read
    "accepted": ["2", "--inference", "--guessed", "3"],
    "precision": ["64-true"],
    "optimizer": ["SGD"],
    "machine": ["h100"],
    "device_memory": ["3GiB"],
    "host_memory": ["48GiB"],
    "host_headroom": ["1GiB"],
    "cores": ["1"],
    "link": ["gen3x1"],
    "disk_speed": ["2GB,1GB", "--disk", ".", "--host-budget", "0B"],
    "copies": ["1"],
    "accumulate": ["2"],
    "clip": [],
    "devices": ["2"],
    "nodes": ["2", "--network", "1GB"],
    "network": ["10Gb", "--nodes", "2"],
    "tensor_parallel_size": ["2"],
    "mesh_link": ["gen4x8"],
    "samples": ["1000"],
    "epochs": ["2", "--samples", "1000"],
    "price": ["0.5", "--samples", "1000"],
    "window": ["3"],
    "transfer": ["2", "--window", "3"],
    "memory_budget": ["{budget}"],  # less than the model
    "host_budget": ["1KiB"],
    "disk": [".", "--host-budget", "0B"],
    "units": ["Linear"],
    "activations": ["recompute+offload"],
    "master_weights": ["--precision", "bf16-true"],
    "divide_state": ["--nodes", "2", "--network", "1GB"],
    "json": None,  # how it is printed: all other runs of this test use it
    "plot": None,
    "timeline": None,
}
SWITCHES = ("clip", "master_weights", "inference", "divide_state")
ANSWERING = ("answer", "cache", "inference", "at_once", "guessed", "accepted")
FEW = [  # the quick ones; a slow run has all
    kind if kind == "function" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS
]
BUDGETS = {
    "listed": "300MiB",
    "listed without a shape": "24GiB",
    "shape": "2MiB",
    "config": "650KiB",
    "torchvision": "120MiB",
    "function": "60KiB",
}
REFUSED = {
    ("listed", "seq"),
    ("listed without a shape", "data"),
    ("listed without a shape", "loss"),
    ("listed without a shape", "units"),
    ("listed without a shape", "activations"),
    ("torchvision", "seq"),
    *((kind, name) for kind in KINDS if kind not in ("shape", "config") for name in ANSWERING),
    *((kind, name) for kind in KINDS for name in ("tensor_parallel_size", "mesh_link")),  # none of them is cut
}
NONSENSE = {
    "batch": "0",
    "seq": "0",
    "data": "Foo",
    "loss": "Foo",
    "answer": "0",
    "cache": "Foo",
    "at_once": "0",
    "guessed": "-1",
    "accepted": "0.5",
    "precision": "Foo",
    "optimizer": "Nonsense",
    "machine": "Foo",
    "device_memory": "Foo",
    "host_memory": "Foo",
    "host_headroom": "Foo",
    "cores": "0",
    "link": "Foo",
    "disk_speed": "Foo",
    "copies": "-1",
    "accumulate": "0",
    "devices": "0",
    "nodes": "0",
    "network": "Foo",
    "tensor_parallel_size": "0",
    "mesh_link": "Foo",
    "samples": "0",
    "epochs": "0",
    "price": "-1",
    "window": "Foo",
    "transfer": "Foo",
    "memory_budget": "Foo",
    "host_budget": "Foo",
    "disk": "",
    "units": "Foo",
    "activations": "Foo",
}
NO_NONSENSE = {"config", "model", *SWITCHES, "json", "plot", "timeline"}


def options_of_plan():
    """All options that the parser has, by name."""
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    return {action.dest: action.option_strings[0] for action in parser._actions}


def planned_as_json(capsys, *arguments):
    """What is printed for these arguments, or the error that ends the command."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *map(str, arguments), "--json"])
    said = capsys.readouterr()
    if stopped.value.code == 2:
        return said.err
    found = json.loads(said.out)
    return {name: found[name] for name in found if name not in ("options", "machine")}  # what follows from them


def of_kind(kind, llama):
    """The arguments for a model of this kind, and the functions of this file that suit it."""
    model = KINDS[kind].format(llama=llama)
    given = ["--model", model, "--machine", "rtx4090", "--precision", "32-true", "--window", "1"]
    if kind == "function":
        given += ["--data", "test_plan_command:rows_of_32"]
    if kind != "listed without a shape" and kind != "listed":
        given += ["--batch", "2"]
    functions = {"function": ("twice_rows_of_32", "mean"), "torchvision": ("images", "of_images")}
    functions |= {"listed": ("vit_images", "summed"), "config": ("ids", "summed"), "shape": ("ids", "summed")}
    return given, functions.get(kind, ("rows_of_32", "mean"))


def twice_rows_of_32(rows, length):
    return torch.zeros(2 * rows, 32)


def images(rows, length):
    return torch.zeros(2 * rows, 3, 224, 224), torch.zeros(2 * rows, dtype=torch.long)


def vit_images(rows, length):
    return {"pixel_values": torch.zeros(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.long)}


def ids(rows, length):
    return {"input_ids": torch.ones(rows, 48, dtype=torch.long), "labels": torch.ones(rows, 48, dtype=torch.long)}


def mean(net, batch):
    return net(net(batch)).mean()


def of_images(net, batch):
    return net(torch.cat([batch[0]] * 2)).mean()


def summed(net, batch):
    found = net(**batch)
    return getattr(found, "loss", found) + sum(p.square().sum() for p in net.parameters())


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.seldom
def test_every_option_is_obeyed_or_refused_by_name(kind, llama, capsys):
    """A new option of the parser fails here until it has a value above, and does something for each kind of model."""
    options = options_of_plan()
    assert options.keys() == VALUES.keys()
    if kind == "torchvision":
        pytest.importorskip("torchvision")
    given, (data, loss) = of_kind(kind, llama)
    plain = planned_as_json(capsys, *given)
    assert isinstance(plain, dict), plain
    for name, values in VALUES.items():
        if values is None:
            continue
        given_to_it = 0 if name in SWITCHES else 1
        flags = [value.format(data=data, loss=loss, budget=BUDGETS[kind]) for value in values[:given_to_it]]
        rest = values[given_to_it:]
        found = planned_as_json(capsys, *given, options[name], *flags, *rest)
        if (kind, name) in REFUSED:
            named = "answer" if name in ANSWERING else name  # nothing of theirs is without an answer
            assert isinstance(found, str) and f"plan: {named} must be" in found, (name, found)
            continue
        without = planned_as_json(capsys, *given, *rest) if rest else plain
        assert isinstance(found, dict), (name, found)
        assert found != without, f"{name} changes nothing"


@pytest.mark.parametrize("kind", FEW)
def test_nonsense_is_refused_by_name(kind, llama, capsys):
    assert options_of_plan().keys() == NONSENSE.keys() | NO_NONSENSE
    if kind == "torchvision":
        pytest.importorskip("torchvision")
    given, _ = of_kind(kind, llama)
    for name, value in NONSENSE.items():
        more = ["--samples", "9"] if name in ("epochs", "price") else []
        more += ["--inference"] if name in ("at_once", "guessed", "accepted") else []
        said = planned_as_json(capsys, *given, options_of_plan()[name], value, *more)
        if kind == "listed without a shape" and "--inference" in more:
            name = "answer"  # which such a model does not
        assert isinstance(said, str) and re.search(rf"plan: .*{name}\b", said), (name, said)


@pytest.mark.seldom
def test_a_student_reads_what_fits_and_how_long_it_takes(capsys):
    """A card of 12 GB, 64 GiB of RAM, a model of 8 B: each change with its bytes and the hours of the run."""
    given = "--model llama-8b --machine rtx4070 --host-memory 64GiB --samples 10000".split()
    run(*given, status=1)
    said = capsys.readouterr().out
    (row,) = [line for line in said.splitlines() if line.startswith("adapters on a frozen bf16 base")]
    assert re.search(r" \d\.\d\d GiB +1\d\.\d\d GiB +[\d.]+ +0\.\d\dx +\d\.\d+ *$", row), row
    assert re.search(r"time per sample +hours", said) and "…" not in said
    assert "\nSpeed, if it fitted: " in said


@pytest.mark.parametrize("name", ["epochs", "price"])
def test_how_long_needs_to_know_of_what(name, capsys):
    run(*of_this_file(f"--{name}", "3"), status=2)
    assert f"{name} must be given together with --samples, got 3" in capsys.readouterr().err


@pytest.mark.seldom
def test_it_says_how_long_a_run_takes_and_what_it_costs(capsys):
    given = ("--model", "llama-8b", "--machine", "rtx4090", "--precision", "bf16-true", "--activations", "recompute")
    given = (*given, "--batch", 2, "--seq", 1024, "--samples", 10001, "--epochs", 3, "--price", 0.5)
    found = planned_as_json(capsys, *given)
    hours = 5001 * 3 * found["step_s"] / 3600
    assert found["run"] == pytest.approx(
        {
            "rows_per_s": 2 / found["step_s"],
            "tokens_per_s": 2048 / found["step_s"],
            "steps": 15003,
            "hours": hours,
            "cost": hours / 2,
        }
    )
    run(*given)
    said = capsys.readouterr().out
    assert re.search(rf"Speed: \d+ tokens a second; 15003 steps take {hours:.3g} hours and cost {hours / 2:.2f}", said)


@pytest.mark.seldom
def test_one_model_has_one_plan(capsys):
    given = ("--machine", "rtx4090", "--activations", "recompute")
    one, other = (planned_as_json(capsys, "--model", name, *given) for name in ("llama-8b", "llama3-8b"))
    assert one == other and one["model"] == "llama-8b"
    assert "llama3-8b" not in model_spec.NAMES and "llama-8b" in model_spec.NAMES


def test_a_name_on_the_hub_is_planned_from_the_cached_config(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    kept = tmp_path / "models--some--tiny"
    (kept / "snapshots" / "0123").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123")
    (kept / "snapshots" / "0123" / "config.json").write_text(json.dumps(LLAMA))
    import transformers.utils.hub as hub

    monkeypatch.setattr(hub, "TRANSFORMERS_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    spec = model_spec.find("some/tiny", 2, 8)
    assert spec.name == "some/tiny" and spec.batch["input_ids"].shape == (2, 8)
    said = "model must be a directory with a config.json, or a name on the hub whose config.json is cached or can be"
    with pytest.raises(OptionError, match=rf"{said} .*without a network, .* got 'some/other'"):
        model_spec.find("some/other", 2, 8)


def tokens(rows, length):
    return {"tokens": torch.zeros(rows, length + 1, dtype=torch.long)}


def test_the_readme_shows_what_is_printed(capsys):
    """Of the command above it, the first lines."""
    (command,) = re.findall(r"^python -m sp_lightning plan (.*)$", README.read_text(), re.MULTILINE)
    run(*command.split())
    printed = "\n".join(capsys.readouterr().out.splitlines()[:2])
    assert f"```text\n{printed}\n```" in README.read_text()


def test_a_workload_is_planned_for_its_tokens(capsys):
    run("--model", "llama3-8b", "--batch", 8, "--machine", "h100", "--activations", "recompute")
    assert "batch of 16384" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, data, message",
    [
        ("llama9", None, "model must be a transformers config.json .* or one of tiny, .* got 'llama9'"),
        ("torchvision:resnet1", None, "model must be one of torchvision's classifiers: .* got 'resnet1'"),
        ("test_plan_command:tower", None, "data must be package.module:function that returns the batch"),
        ("test_plan_command:no", "x:y", r"model must be package.module:function that can be imported \(module"),
        ("test_plan_command:tower", "no_such:thing", r"data must be package.module:function that can be imported"),
        ("test_plan_command:LLAMA", "test_plan_command:rows_of_32", "model must be a function, not a dict, got"),
        ("missing.json", None, "model must be a readable config.json of transformers"),
    ],
)
def test_a_model_that_is_not_found_is_refused(text, data, message):
    with pytest.raises(OptionError, match=message):
        model_spec.find(text, 1, None, data)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"hidden_size": 3}, "model must be a config.json with a model_type that .* model_type None'"),
        (
            LLAMA | {"num_hidden_layers": 0},
            "model must be a config with layers .* a model without layers has nothing to stream",
        ),
    ],
)
def test_a_config_without_a_model_or_without_layers_is_refused(config, message, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match=message):
        model_spec.find(str(tmp_path), 1, 1)


def test_what_takes_neither_texts_nor_images_needs_a_batch(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(WHISPER))
    said = "data must be package.module:function: .* WhisperForConditionalGeneration takes input_features, got None"
    with pytest.raises(OptionError, match=said):
        model_spec.find(str(tmp_path), 1, 1)
    assert model_spec.find(str(tmp_path), 1, 4, "test_plan_command:rows_of_32").batch.shape == (1, 32)


def test_a_picture_whose_format_is_not_known_is_refused_before_any_work(capsys):
    pytest.importorskip("matplotlib")
    for name in ("plan.xyz", "plan"):
        run(*of_this_file("--plot", name), status=2)
        said = capsys.readouterr()
        assert re.search(rf"plot must be a file that ends in one of .*, \.png, .*, got '{name}'", said.err)
        assert said.out == ""


def test_a_file_that_can_not_be_written_ends_with_a_sentence(tmp_path, capsys):
    (tmp_path / "file").touch()
    run(*of_this_file("--timeline", tmp_path / "file" / "trace.json"), status=2)
    assert "in a folder that can be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--machine", "abacus"), "machine must be 'here', a machine.Machine, or one of 'rtx3060'"),
        (("--batch", 0), "batch must be an int >= 1, got 0"),
        (("--seq", -1), "seq must be an int >= 1, got -1"),
        (("--device-memory", "big"), "device_memory must be a size with its unit, such as"),
        (("--host-memory", "64"), "host_memory must be a size with its unit, such as"),
        (("--host-headroom", "4"), "host_headroom must be a size with its unit"),
        (("--memory-budget", "10"), "memory_budget must be a size with its unit"),
        (("--host-budget", "10"), "host_budget must be a size with its unit"),
        (("--link", "12"), "link must be a PCIe generation and its lanes"),
        (("--disk-speed", "7,5"), "disk_speed must be bytes per second"),
        (("--window", "wide"), "window must be an int >= 1 or 'auto'"),
        (("--activations", "drop"), "activations must be one of 'keep'"),
        (("--cheese", "1"), "plan does not know --cheese 1"),
    ],
)
def test_bad_arguments_end_with_a_sentence(arguments, message, capsys):
    run(*of_this_file(*arguments), status=2)
    assert message in capsys.readouterr().err


# ---- several devices


def said_of(capsys, *arguments, status=0):
    run(*of_this_file("--batch", 8, *arguments), status=status)
    return capsys.readouterr().out


@pytest.mark.seldom
def test_one_device_is_planned_as_if_nothing_were_said_of_devices(capsys):
    assert said_of(capsys, "--devices", 1) == said_of(capsys)
    assert said_of(capsys, "--devices", 1, "--json") == said_of(capsys, "--json")
    assert " each" not in said_of(capsys)


def test_several_devices_have_a_batch_each_and_one_host(capsys):
    said = said_of(capsys, "--devices", 2, "--samples", 32)
    assert "batch of 8 rows each" in said and "on 2 x rtx4090" in said and "under way" in said
    assert "; 2 steps take" in said
    alone = json.loads(said_of(capsys, "--json", "--samples", 32, "--window", 2))
    both = json.loads(said_of(capsys, "--json", "--samples", 32, "--window", 2, "--devices", 2))
    assert (alone["run"]["steps"], both["run"]["steps"]) == (4, 2)
    assert both["run"]["rows_per_s"] == pytest.approx(2 * 8 / both["step_s"])
    assert both["device_nbytes"] == alone["device_nbytes"]
    for term in ("weights", "optimizer"):
        assert both["host"][term] == alone["host"][term]
    assert both["host"]["wire"] == 2 * alone["host"]["wire"] > 0
    # Of a device that is alone they stay as they came down, those that come down in half precision.
    saved = both["host"]["gradients"] - alone["host"]["gradients"]
    assert saved == pytest.approx(alone["host"]["wire"], rel=0.05)


def test_several_machines_have_a_host_each_and_send_all_but_their_share_twice(capsys):
    """Of the FP32 sums of gradients that came down in half precision; once in a step."""

    def plan(*arguments):
        return json.loads(said_of(capsys, "--json", "--window", 2, *arguments))

    alone = plan("--devices", 2)
    sizes = {}
    for nodes in (2, 4):
        found = sizes[nodes] = plan("--devices", 2, "--nodes", nodes, "--network", "1MB")
        assert found["network_nbytes"] == 8 * (nodes - 1) * found["parameters"] / nodes
        assert found["step_s"] >= found["network_nbytes"] / 1e6 and found["binds"] == "network"
        assert found["run"]["rows_per_s"] == pytest.approx(2 * nodes * 8 / found["step_s"])
        for term in ("weights", "gradients", "optimizer", "wire"):
            assert found["host"][term] == alone["host"][term]
    units = 4 * max(found["parameters"] for found in sizes.values())  # no unit has as many
    of_two, of_four = (sizes[nodes]["host"]["under_way"] - alone["host"]["under_way"] for nodes in (2, 4))
    assert 0 < of_two < 3 * units and of_four == of_two * 4 / 3
    several = plan("--nodes", 2, "--network", "1MB", "--accumulate", 8)
    assert several["accumulating_s"] < several["step_s"] / 10
    assert several["run"]["rows_per_s"] == pytest.approx(
        2 * 8 * 8 / (several["step_s"] + 7 * several["accumulating_s"])
    )
    said = said_of(capsys, "--devices", 2, "--nodes", 2, "--network", "1MB")
    assert "on 2 machines with 2 x rtx4090" in said and "to other machines" in said and "waiting: network" in said


def test_machines_that_divide_the_state_have_a_share_of_it_and_send_new_weights(capsys):
    def plan(*arguments):
        return json.loads(said_of(capsys, "--json", "--window", 2, "--nodes", 4, "--network", "1MB", *arguments))

    whole, divided = plan(), plan("--divide-state")
    assert divided["host"]["optimizer"] == whole["host"]["optimizer"] // 4
    assert divided["network_nbytes"] == 1.5 * whole["network_nbytes"]
    assert divided["step_s"] > divided["floor_s"] >= divided["network_nbytes"] / 1e6
    for term in ("weights", "gradients", "wire", "under_way"):
        assert divided["host"][term] == whole["host"][term]
    run(*of_this_file("--nodes", 2, "--network", "1MB", "--divide-state", "--optimizer", "Adafactor"), status=2)
    assert "divide_state must be False with Adafactor" in capsys.readouterr().err


def cut(mesh):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512)) for _ in range(3)))
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return model


def wide_batch(rows, length):
    return torch.zeros(rows, 512)


def test_layers_are_cut_among_devices(capsys):
    given = ["--model", "test_plan_command:cut", "--data", "test_plan_command:wide_batch", "--batch", 64]
    given += ["--machine", "rtx4090"]
    given += ["--precision", "32-true", "--window", 1]

    def planned(*more):
        run(*given, "--json", *more)
        return json.loads(capsys.readouterr().out)

    two, four = (planned("--tensor-parallel-size", 2, "--devices", devices) for devices in (2, 4))
    assert two["shards"] == 2 and two["parameters"] == 3 * (2 * 512 * 2048 + 2048 + 512)
    assert two["mesh_nbytes"] == (2 * 3 - 1) * 64 * 512 * 4  # a sum in forward, and one in backward but for the inputs
    assert two["host"]["weights"] == pytest.approx(4 * two["parameters"], rel=0.01)
    assert four["host"]["weights"] > two["host"]["weights"] and four["run"]["rows_per_s"] > two["run"]["rows_per_s"]
    slow = planned("--tensor-parallel-size", 2, "--mesh-link", "10MB")
    assert slow["step_s"] - two["step_s"] == pytest.approx(two["mesh_nbytes"] / 10e6, rel=0.2)
    run(*given, "--tensor-parallel-size", 2, "--devices", 4)
    said = capsys.readouterr().out
    assert "batch of 64 rows for each 2 devices" in said and "on 4 x rtx4090, layers cut among 2" in said
    assert "to devices with other shards" in said


def test_one_machine_alone_has_no_network(capsys):
    run(*of_this_file("--network", "1GB"), status=2)
    assert "network must be given together with nodes > 1 that train" in capsys.readouterr().err
    run(*of_this_file("--nodes", 2), status=2)
    assert 'network must be given together with nodes: the line such as "100Gb"' in capsys.readouterr().err


@pytest.mark.seldom
def test_each_device_has_gradients_where_they_are_accumulated_or_scaled(capsys):
    def gradients(*arguments):
        return json.loads(said_of(capsys, "--json", *arguments))["host"]["gradients"]

    once = gradients("--devices", 3)
    assert gradients("--devices", 3, "--accumulate", 2) == 4 * once
    assert gradients("--devices", 3, "--precision", "16-mixed") == 4 * once
    assert gradients("--accumulate", 2) == once


def test_an_optimizer_that_is_not_cut_has_its_state_on_each_device(capsys):
    def host(*arguments):
        return json.loads(said_of(capsys, "--json", *arguments))["host"]

    alone, both = host("--optimizer", "AdamW8bit"), host("--optimizer", "AdamW8bit", "--devices", 2)
    assert both["optimizer"] == 2 * alone["optimizer"]
    assert both["weights"] == 3 * alone["weights"]


@pytest.mark.seldom
def test_a_disk_has_its_bytes_times_and_wear_in_the_plan(capsys, tmp_path, monkeypatch):
    from sp_lightning.observe import disk_speed

    arguments = ["--model", "llama3-8b", "--host-budget", "0B", "--disk", tmp_path]
    run(*arguments, "--machine", "rtx4090", "--disk-speed", "7GB,5GB,1")
    out = " ".join(capsys.readouterr().out.split())
    assert "reading 150.55 GiB from files 23.09 writing 133.64 GiB to files 28.7" in out  # of gradients, too
    assert "Wear: a step writes 143 GB to the disk: 8,360 steps to 1,200 TB, the rating of a consumer drive" in out
    monkeypatch.setattr(disk_speed, "LARGEST", 16 << 20)
    monkeypatch.setattr(command, "MEASURED_S", 0.1)
    with pytest.raises(SystemExit):
        cli.main(["plan", *map(str, arguments), "--json"])
    values = json.loads(capsys.readouterr().out)
    assert values["machine"]["disk_out_bytes_per_s"] != 5e9 and 0.5 <= values["machine"]["disk_duplex"] <= 1
    assert list(tmp_path.iterdir()) == []

"""``plan --config``: what is planned is what ``fit`` with the same arguments runs."""

import json
import pathlib
import re

import lightning as L
import pytest
import torch

from sp_lightning import cli
from sp_lightning.commands import fit_config
from sp_lightning.errors import OptionError
from sp_lightning.planning import plan

pytest.importorskip("jsonargparse")
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
QUIET = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Where a run writes, and where the recipes are imported from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES.parent))
    monkeypatch.setattr("sys.argv", ["sp_lightning"])


class Seen(L.Callback):
    """What a run has in its first step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0 and trainer.current_epoch == 0:
            self.shapes = shapes(batch)
            self.parameters = described(pl_module)
            units = trainer.strategy.handle.units
            self.units = sorted(unit.name for unit in units if not unit.resident)
            self.steps = trainer.estimated_stepping_batches

    def on_train_end(self, trainer, pl_module):
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        self.state_nbytes = sum(tensor.nbytes for tensor in tensors if tensor.dim())
        self.weight_nbytes = sum(parameter.nbytes for parameter in pl_module.parameters())


def shapes(batch):
    tensors = batch.values() if hasattr(batch, "values") else batch
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def described(module):
    return {
        name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }


def trained(arguments):
    """Train one epoch as the command line does, with a callback that looks."""
    given = cli_of(arguments)
    seen = Seen()
    given.trainer.callbacks.append(seen)
    given.trainer.fit(given.model, datamodule=given.datamodule)
    return seen, given


def cli_of(arguments):
    from lightning.pytorch.cli import LightningCLI

    strategy = {"strategy": {"class_path": "sp_lightning.SuperpipelineStrategy"}}
    return LightningCLI(args=arguments, run=False, save_config_callback=None, trainer_defaults=strategy)


NEEDS = {"lora_llm": "peft", "sweep": "peft", "preference": "peft", "diffusion": "diffusers"}
CASES = [
    ("finetune_llm", ["--data.batch_size", "2", "--trainer.accumulate_grad_batches", "4", "--trainer.max_epochs", "2"]),
    ("finetune_llm", ["--trainer.precision", "bf16-true", "--data.packing", "false", "--trainer.max_steps", "3"]),
    ("finetune_llm", ["--trainer.precision", "bf16-mixed", "--trainer.max_epochs", "1", "--model.dtype", "bfloat16"]),
    ("lora_llm", ["--trainer.precision", "bf16-mixed", "--trainer.max_epochs", "1"]),
    ("finetune_vision", ["--trainer.max_epochs", "1", "--trainer.strategy.window", "3"]),
    ("finetune_vlm", ["--model.train", "connection", "--trainer.max_epochs", "1"]),
    ("moe", ["--trainer.max_epochs", "1"]),
    ("pretrain_small", ["--trainer.max_steps", "4", "--model.layers", "3"]),
    ("distill", ["--trainer.max_epochs", "1", "--model.match", "both"]),
    ("prune", ["--trainer.max_epochs", "1", "--trainer.accumulate_grad_batches", "2"]),
    ("moefy", ["--trainer.max_epochs", "1"]),
    ("pseudo_to_real", ["--trainer.max_steps", "3", "--model.delink_at", "3"]),  # which is never reached
    ("pseudo_to_real", ["--trainer.max_steps", "3", "--model.delink_at", "0"]),
    ("sweep", ["--trainer.max_epochs", "1"]),
    ("sweep", ["--trainer.precision", "bf16-mixed", "--trainer.max_epochs", "1", "--model.dtype", "bfloat16"]),
    ("diffusion", ["--trainer.max_epochs", "1"]),
    ("diffusion", ["--trainer.precision", "bf16-mixed", "--model.train", "all", "--model.dtype", "bfloat16"]),
    ("speech", ["--trainer.max_epochs", "1"]),
    ("preference", ["--trainer.max_epochs", "1"]),
    ("preference", ["--trainer.max_epochs", "1", "--model.train", "all"]),
]
CHEAP = CASES[0], ("diffusion", ["--trainer.max_epochs", "1"])
ANSWER = {"predict", "classify", "describe", "embed"}  # and train nothing
RECIPES = sorted(path.parent.name for path in EXAMPLES.glob("*/config.yaml"))


def test_every_recipe_that_trains_has_a_case():
    assert {recipe for recipe, _ in CASES} == {*RECIPES} - ANSWER


@pytest.mark.seldom
def test_of_a_recipe_that_answers_the_run_of_predict_is_planned(capsys):
    pytest.importorskip("transformers")
    given = ["plan", "--config", str(EXAMPLES / "predict" / "config.yaml"), "--machine", "rtx4090", "--json", *QUIET]

    def found(*more):
        with pytest.raises(SystemExit):
            cli.main([*given, *more])
        return json.loads(capsys.readouterr().out)

    there, away = found(), found("--model.cache", "host", "--model.max_new_tokens", "99", "--data.batch_size", "4")
    assert (there["rows"], there["answer"], away["rows"], away["answer"]) == (64, 16, 16, 99)  # of four batches
    assert there["host"]["keys_and_values"] == 0 < away["host"]["keys_and_values"]
    assert (there["trained"], there["run"]["steps"], away["run"]["steps"]) == (0, 1, 2)  # of 32 prompts


CUT = ["--model", "sharded_fits.Cut", "--model.name", "in sequence", "--data", "sharded_fits.Words", *QUIET]


@pytest.mark.parametrize("size", [1, 2, "auto"])
def test_of_layers_that_a_mesh_cuts_each_devices_part_is_planned(size, capsys):
    given = ["plan", *CUT, "--machine", "rtx4090", "--json", "--trainer.devices", "4", "--trainer.max_steps", "3"]

    def found(*more):
        with pytest.raises(SystemExit) as ended:
            cli.main([*given, *more])
        return ended.value.code, capsys.readouterr()

    asked = ["--trainer.strategy", "sp_lightning.SuperpipelineStrategy", "--trainer.strategy.tensor_parallel_size"]
    code, said = found(*asked, str(size))
    plan = json.loads(said.out)
    shards = 4 if size == "auto" else size
    assert code == 0 and (plan["shards"], plan["devices"], plan["rows"]) == (shards, 4, 3)
    code, said = found(*asked, "3")
    assert code == 2 and "tensor_parallel_size must be such that their product is the number of devices" in said.err
    code, said = found(*asked, "2", "--tensor-parallel-size", "2")
    assert code == 2 and "must be left out beside arguments of fit" in said.err


@pytest.mark.seldom
def test_of_answers_about_images_the_pass_that_sees_them_is_planned_too():
    pytest.importorskip("transformers")
    run = fit_config.find(["--config", str(EXAMPLES / "describe" / "config.yaml"), *QUIET])

    def planned(*without):
        batch = {name: value for name, value in run.spec.batch.items() if name not in without}
        return plan(run.spec.model, batch, machine="rtx4090", window=1, answer=run.answer, cache=run.cache)

    seen, blind = planned(), planned("pixel_values")
    assert seen.step_s == blind.step_s and seen.reading_s > blind.reading_s


def test_a_module_that_neither_trains_nor_generates_is_not_planned(capsys):
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit):
        cli.main(["plan", "--config", str(EXAMPLES / "embed" / "config.yaml"), "--machine", "rtx4090", *QUIET])
    said = capsys.readouterr().err
    assert (
        "model must be a module with a training_step, or one that says what it generates" in said and "'Embed'" in said
    )


@pytest.mark.parametrize(
    "recipe, more", [pytest.param(*case, marks=() if case in CHEAP else pytest.mark.slow) for case in CASES]
)
@pytest.mark.seldom
def test_what_is_planned_is_what_runs(recipe, more):
    pytest.importorskip("transformers")
    if recipe in NEEDS:
        pytest.importorskip(NEEDS[recipe])
    arguments = ["--config", str(EXAMPLES / recipe / "config.yaml"), *more, *QUIET]
    run = fit_config.find(arguments)
    found = plan(
        run.spec.model,
        run.spec.batch,
        precision=run.precision,
        copies=run.copies,
        trained_copies=run.trained_copies,
        machine="rtx4060",
        own_gradients=run.own_gradients,
        **run.options,
    )
    seen, given = trained(arguments)
    options = given.trainer.strategy.options
    assert run.options == vars(options) or run.options == {name: getattr(options, name) for name in run.options}
    assert run.precision == str(given.config.trainer.precision or "32-true")
    assert run.accumulate == given.trainer.accumulate_grad_batches
    assert shapes(run.spec.batch) == seen.shapes
    assert sorted(found.units) == seen.units
    assert run.steps == (seen.steps if seen.steps < float("inf") else None)
    assert found.parameters == sum(torch.Size(shape).numel() for shape, *_ in seen.parameters.values())
    aligned = 256 * len(seen.parameters)  # of a few KiB these are much
    assert found.host.weights == pytest.approx(seen.weight_nbytes, abs=aligned)
    trainable = sum(parameter.nbytes for parameter in given.model.parameters() if parameter.requires_grad)
    assert found.host.gradients == pytest.approx(trainable, abs=aligned)
    assert found.host.optimizer == pytest.approx(seen.state_nbytes, abs=2 * aligned)
    average = {"finetune_vision": seen.weight_nbytes, "diffusion": trainable}
    assert found.host.copies == pytest.approx(average.get(recipe, 0), abs=aligned)


def test_a_model_is_planned_without_its_weights(tmp_path, capsys):
    """From a directory with a config and a tokenizer; its loss in chunks, as the recipe decides without weights."""
    transformers = pytest.importorskip("transformers")
    from examples.common import tiny

    words = tiny.tokenizer(tiny.sentences(50))
    words.save_pretrained("large")
    sizes = {**tiny.sizes(words), "vocab_size": 20000, "hidden_size": 512, "intermediate_size": 1024}
    transformers.LlamaConfig(**sizes).save_pretrained("large")
    tiny.write_jsonl(pathlib.Path("my.jsonl"), tiny.chats(40))
    given = ["plan", "--config", str(EXAMPLES / "finetune_llm" / "config.yaml"), "--machine", "rtx4060", "--json"]
    given += "--model.name_or_path large --data.path my.jsonl --trainer.precision bf16-mixed".split()

    def planned(*more):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main([*given, *more])
        assert stopped.value.code == 0
        return json.loads(capsys.readouterr().out)

    auto, full = planned(), planned("--model.loss", "full")
    assert not list(pathlib.Path("large").glob("*.safetensors")) and auto["parameters"] == full["parameters"]
    chunks = hasattr(torch.nn, "LinearCrossEntropyOptions")
    assert (auto["flops"] > full["flops"]) == chunks
    assert auto["run"]["steps"] % 3 == 0  # epochs
    cheap = planned("--model.loss", "full", "--price", "2", "--trainer.accumulate_grad_batches", "8")
    assert cheap["run"]["cost"] == pytest.approx(2 * cheap["run"]["hours"])
    assert cheap["run"]["rows_per_s"] > full["run"]["rows_per_s"]  # the optimizer steps less often
    assert cheap["accumulating_s"] < cheap["step_s"]


def test_a_plan_in_place_of_fit_warns_of_nothing_that_its_user_did(monkeypatch, recwarn):
    words = ["--config", str(EXAMPLES / "finetune_llm" / "config.yaml"), "--trainer.max_epochs", "1"]
    monkeypatch.setattr("sys.argv", ["sp_lightning", "plan", *words])
    fit_config.find(words)
    assert not [one for one in recwarn if "args parameter" in str(one.message)]


@pytest.mark.seldom
def test_the_command_that_a_plan_offers_runs_what_was_planned(capsys):
    """The recipe's own batch, learning rate and epochs are those of a tiny model."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from examples.common import tiny

    words = tiny.tokenizer(tiny.sentences(50))
    words.save_pretrained("mine")
    transformers.LlamaConfig(**tiny.sizes(words)).save_pretrained("mine")
    tiny.write_jsonl(pathlib.Path("my.jsonl"), tiny.chats(200))
    with pytest.raises(SystemExit):
        cli.main("plan --model llama-8b --machine rtx4070 --host-memory 24GiB --batch 3 --seq 32".split())
    said = capsys.readouterr().out
    (offered,) = re.findall(r"adapters on a frozen bf16 base .*: python -m sp_lightning fit (.*)", said)
    run = fit_config.find(offered.replace("examples/", f"{EXAMPLES}/").replace("MODEL", "mine").split())
    assert run.spec.batch["input_ids"].shape == (3, 32)
    assert (run.precision, run.accumulate) == ("bf16-true", 1)


class TwoOptimizers(L.LightningModule):
    """A module of the user's, with manual optimization, whose weights are made in ``__init__``."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.automatic_optimization = False
        self.one = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        self.two = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))

    def loss(self, batch):
        return self.two(self.one(batch[0])).square().mean()

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.one.parameters()), torch.optim.SGD(self.two.parameters(), lr=0.1)


class Numbers(L.LightningDataModule):
    def __init__(self, rows: int = 6):
        super().__init__()
        self.rows = rows

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 64)), self.rows)


def loss_of_two(module, batch):
    return module.loss(batch)


@pytest.mark.parametrize("loss", [[], ["--loss", "test_fit_config:loss_of_two"]])
@pytest.mark.few(1)
def test_a_module_with_two_optimizers_and_an_average_is_planned(loss, capsys):
    pathlib.Path("config.yaml").write_text(
        "model: {class_path: test_fit_config.TwoOptimizers, init_args: {width: 64}}\n"
        "data: {class_path: test_fit_config.Numbers}\n"
        "trainer:\n  max_epochs: 2\n  devices: 1\n"
        "  callbacks: [{class_path: lightning.pytorch.callbacks.EMAWeightAveraging}]\n"
    )
    with pytest.raises(SystemExit):
        cli.main([*"plan --config config.yaml --machine rtx4060 --json --data.rows 5 --model.width 64".split(), *loss])
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == []
    weights = 8 * 65 * 64 * 4
    assert found["rows"] == 5 and found["run"]["steps"] == 2 * 7
    assert found["host"]["weights"] == pytest.approx(weights, rel=0.05)
    assert found["host"]["copies"] == found["host"]["weights"]
    assert found["host"]["optimizer"] == pytest.approx(weights, rel=0.05)  # AdamW's two moments of a half


class Adversaries(TwoOptimizers):
    """Trains its halves in turn, with a schedule for each and a copy of one that is averaged."""

    def __init__(self, width: int = 64, falls: int = 0):
        super().__init__(width)
        self.falls = falls  # by so much too many schedulers are asked for
        self.average = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))).requires_grad_(False)

    def training_step(self, batch, index):
        schedulers = self.lr_schedulers()
        schedulers[len(schedulers) - 1 + self.falls].step()
        for optimizer, part in zip(self.optimizers(), (self.one, self.two), strict=True):
            self.toggle_optimizer(optimizer)
            trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
            assert trained == [name for name, parameter in self.named_parameters() if parameter in {*part.parameters()}]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        return list(optimizers), [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]


def test_optimizers_that_take_turns_are_planned_with_their_schedules(capsys):
    given = "plan --model test_fit_config.Adversaries --data test_fit_config.Numbers --machine rtx4060 --json"
    with pytest.raises(SystemExit) as stopped:
        cli.main([*given.split(), "--trainer.devices", "1"])
    found = json.loads(capsys.readouterr().out)
    assert (stopped.value.code, found["notes"], found["run"]["steps"]) == (0, [], 6 * 1000)  # epochs, as fit sets them
    trained = 8 * 65 * 64 * 4
    assert found["host"]["gradients"] == pytest.approx(trained, rel=0.05)
    assert found["host"]["weights"] == pytest.approx(1.5 * trained, rel=0.05)
    with pytest.raises(SystemExit):
        cli.main([*given.split(), "--model.falls", "2"])
    said = capsys.readouterr().err
    assert re.search(r"Trainer and without data: \S+test_fit_config.py:\d+: IndexError: list index out of range", said)


def test_plan_in_place_of_fit(capsys):
    given = "--model test_fit_config.TwoOptimizers --data test_fit_config.Numbers --model.width 64 --data.rows 4"
    more = "--trainer.max_epochs 3 --trainer.precision bf16-mixed --trainer.strategy.window 2"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *given.split(), *more.split(), "--machine", "rtx4060", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (stopped.value.code, found["rows"], found["window"], found["run"]["steps"]) == (0, 4, 2, 24)
    assert found["precision"] == "bf16-mixed" and found["model"] == "TwoOptimizers"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--batch", "3"], "batch must be left out beside arguments of fit, which say it"),
        (["--master-weights"], "master_weights must be left out beside arguments of fit"),
        (["--divide-state"], "divide_state must be left out beside arguments of fit: give --trainer.strategy.divide"),
        (["--trainer.strategy", "auto"], r"trainer.strategy must be superpipeline \(or left out\), for a plan, got"),
        (["--data.path", "missing.jsonl"], "missing.jsonl"),
    ],
)
@pytest.mark.few(3)
def test_what_a_config_cannot_be_planned_with_is_refused(arguments, message, capsys):
    given = ["plan", "--config", str(EXAMPLES / "finetune_llm" / "config.yaml"), "--machine", "rtx4060"]
    try:
        cli.main([*given, *arguments])
    except SystemExit as stopped:
        assert stopped.code == 2
        said = capsys.readouterr().err
    except Exception as error:  # of the recipe, as fit shows it
        said = str(error)
    assert re.search(message, said), said


def test_without_a_config_a_model_is_needed(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--machine", "rtx4060"])
    assert "model must be given, unless --config is" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", "--model.width", "3"])
    assert "plan does not know --model.width 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chosen", "count"), [("[0,1]", 2), ("0,1", 2), ("1,", 1), ("3", 3), ("-1", None), ("auto", None)]
)
def test_devices_that_a_config_chooses_by_number_count(chosen, count):
    """All of a machine are one, and the plan says so."""
    given = ["--model", "test_fit_config.Small", "--data", "test_fit_config.Rows", *QUIET, "--trainer.devices", chosen]
    run = fit_config.find(given)
    assert (run.devices, bool(run.notes)) == (count or 1, count is None)
    assert fit_config.find([*given[:-2], "--trainer.accelerator", "cpu"]).notes == ()


def test_a_plan_says_for_how_many_devices_it_is_where_only_the_machine_knows(capsys):
    given = ["--model", "test_fit_config.Small", "--data", "test_fit_config.Rows", *QUIET, "--machine", "rtx4090"]
    with pytest.raises(SystemExit):
        cli.main(["plan", *given, "--trainer.devices", "auto"])
    assert "Note: devices='auto', which is all of a machine, is planned as one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "machines", "count"),
    [
        ({"tensor": "2"}, 1, 2),
        ({"tensor": "auto"}, 1, 2),
        ({"tensor": "2", "data": "3"}, 2, 3),
        ({"tensor": "2"}, 2, 2),
    ],
)
def test_of_a_mesh_all_devices_of_a_machine_are_the_fewest_that_it_has(sizes, machines, count):
    given = [*CUT, "--trainer.max_steps", "3", "--trainer.devices", "auto", "--trainer.num_nodes", str(machines)]
    given += ["--trainer.strategy", "sp_lightning.SuperpipelineStrategy"]
    for axis, size in sizes.items():
        given += [f"--trainer.strategy.{axis}_parallel_size", size]
    run = fit_config.find(given)
    assert (run.devices, run.nodes, run.tensor_parallel_size) == (count, machines, 2)
    assert f"is planned as {count}, the fewest" in run.notes[0]


@pytest.mark.parametrize(("makes", "count", "trained"), [("true", 2 * 72 + 6 * 9, 2 * 72 + 6 * 9), ("false", 216, 144)])
def test_the_weights_that_setup_leaves_are_planned(makes, count, trained):
    given = ["--model", "test_fit_config.SetUp", "--data", "test_fit_config.Rows", *QUIET, "--model.makes", makes]
    run = fit_config.find([*given, "--trainer.devices", "1"])
    found = plan(run.spec.model, run.spec.batch, machine="rtx4060", **run.options)
    assert (found.parameters, found.trained, run.notes) == (count, trained, ())
    freezes = ["--trainer.callbacks", "lightning.pytorch.callbacks.BackboneFinetuning", "--trainer.devices", "1"]
    (note,) = fit_config.find([*given, *freezes]).notes
    assert note.startswith("BackboneFinetuning freezes weights until it trains them")


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_a_config_may_name_a_progress_bar(bar):
    pytest.importorskip("rich")
    given = ["--model", "test_fit_config.Small", "--data", "test_fit_config.Rows", "--trainer.logger", "false"]
    given += ["--trainer.callbacks", f"lightning.pytorch.callbacks.{bar}", "--trainer.callbacks.refresh_rate", "20"]
    assert fit_config.find([*given, "--trainer.max_epochs", "1"]).steps == 8


def test_a_device_that_a_config_names_need_not_be_here():
    given = ["--model", "test_fit_config.Small", "--data", "test_fit_config.Rows", *QUIET]
    given += ["--trainer.strategy", "sp_lightning.SuperpipelineStrategy", "--trainer.strategy.device", "cuda:1"]
    assert fit_config.find([*given, "--trainer.devices", "1"]).devices == 1
    with pytest.raises(OptionError, match="device must be left out with several devices"):
        fit_config.find([*given, "--trainer.devices", "2"])


def test_devices_of_a_config_are_planned_with_a_share_of_the_data_each():
    """As LightningCLI would train: half of the batches, and gradients of each rank where the Trainer clips values."""
    given = ["--model", "test_fit_config.Small", "--data", "test_fit_config.Rows", "--trainer.max_epochs", "2"]
    alone = fit_config.find([*given, *QUIET])
    clips = ["--trainer.gradient_clip_val", "1", "--trainer.gradient_clip_algorithm", "value"]
    both = fit_config.find([*given, *QUIET, *clips, "--trainer.devices", "2"])
    assert not fit_config.find([*given, *QUIET, *clips[:2], "--trainer.devices", "2"]).own_gradients  # by norm
    assert not fit_config.find([*given, *QUIET, *clips[:2]]).own_gradients
    assert fit_config.find([*given, *QUIET, *clips]).own_gradients  # a device that is alone has them in FP32 then
    assert (alone.clip, both.clip) == (False, True)
    assert (alone.devices, both.devices) == (1, 2)
    assert (alone.own_gradients, both.own_gradients) == (False, True)
    assert (alone.steps, both.steps) == (2 * 8, 2 * 4)
    assert shapes([both.spec.batch]) == shapes([alone.spec.batch])


class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))

    def training_step(self, batch, index):
        return self.layers(batch).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class SetUp(Small):
    """Makes a layer by the data in ``setup``, or freezes one there; and data, which a plan makes once."""

    def __init__(self, makes: bool = False):
        super().__init__()
        self.makes = makes

    def setup(self, stage):
        if self.makes:
            self.layers[2] = torch.nn.Linear(8, self.trainer.datamodule.classes)
        else:
            self.layers[0].requires_grad_(False)
            self.order = torch.randperm(4, generator=torch.Generator()).tolist()

    def configure_optimizers(self):
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad])


class Rows(L.LightningDataModule):
    classes = 6

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(32, 8), batch_size=4)


class OfSeveral(L.LightningModule):
    """A module of the user's, whose batches come from several loaders."""

    def __init__(self, kind: str = "dict"):
        super().__init__()
        self.kind = kind
        self.net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def training_step(self, batch, index):
        one, two = batch.values() if self.kind == "dict" else batch
        return self.net(one).square().mean() + self.net(two).square().mean()

    def on_train_batch_start(self, batch, index):
        self.seen = shapes(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        one, two = (torch.utils.data.DataLoader(torch.randn(8, 64), rows) for rows in (2, 4))
        loaders = {"dict": {"one": one, "two": two}, "list": [one, two]}
        shortest = L.pytorch.utilities.CombinedLoader([one, two], "min_size")
        return loaders.get(self.kind, shortest)


class Answers(L.LightningModule):
    generates = 4, None

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def predict_step(self, batch):
        return self.net(batch["input_ids"].float())

    def predict_dataloader(self):
        prompts = [{"input_ids": torch.ones(4, dtype=torch.long)}] * 6
        return [torch.utils.data.DataLoader(prompts, batch_size=rows) for rows in (2, 3)]


@pytest.mark.parametrize("kind, steps", [("dict", 4), ("list", 4), ("shortest", 2)])
def test_a_batch_of_several_loaders_is_the_one_that_the_trainer_makes_of_them(kind, steps):
    arguments = ["--model", "test_fit_config.OfSeveral", "--model.kind", kind, "--trainer.max_epochs", "1", *QUIET]
    run = fit_config.find(arguments)
    given = cli_of(arguments)
    given.trainer.fit(given.model)
    assert shapes(run.spec.batch) == given.model.seen
    assert run.steps == given.trainer.global_step == steps
    assert plan(run.spec.model, run.spec.batch, machine="rtx4060").fits


def test_batches_of_prompts_of_several_loaders_are_all_counted():
    run = fit_config.find(["--model", "test_fit_config.Answers", *QUIET])
    assert (run.spec.batch["input_ids"].shape, run.steps) == ((2, 4), 3 + 2)


def scheduled(**schedule):
    epochs = "{" + ", ".join(f"{epoch[1:]}: {count}" for epoch, count in schedule.items()) + "}"
    kind = "lightning.pytorch.callbacks.GradientAccumulationScheduler"
    return ["--trainer.callbacks", kind, "--trainer.callbacks.scheduling", epochs]


@pytest.mark.parametrize(
    "schedule, more, accumulate",
    [
        ({"e0": 4}, ["--trainer.max_epochs", "2"], 4),
        ({"e0": 3}, ["--trainer.max_epochs", "1"], 3),  # with a step of two batches
        ({"e0": 1, "e1": 4, "e2": 8}, ["--trainer.max_epochs", "4"], 3),  # 8, 2, 1 and 1 steps: the mean is 2.7
        ({"e1": 8}, ["--trainer.max_epochs", "9", "--trainer.max_steps", "9"], 2),
        ({"e0": 2, "e1": 4}, ["--trainer.max_epochs", "-1"], 4),  # without an end
    ],
)
def test_steps_of_a_schedule_of_accumulation_are_those_of_the_run(schedule, more, accumulate):
    given = ["--model", "test_fit_config.Small", "--data", "test_fit_config.Rows", *scheduled(**schedule), *more]
    run = fit_config.find([*given, *QUIET])
    assert run.accumulate == accumulate
    if more[-1] == "-1":
        assert run.steps is None
        return
    cli_run = cli_of([*given, *QUIET])
    cli_run.trainer.fit(cli_run.model, datamodule=cli_run.datamodule)
    assert run.steps == cli_run.trainer.global_step


def test_a_schedule_of_accumulation_gives_each_device_gradients_of_its_own():
    """Also if it begins with steps of one batch; fit and plan ask the strategy alike."""
    given = ["--model", "test_fit_config.Small", "--data", "test_fit_config.Rows", "--trainer.max_epochs", "2", *QUIET]
    assert fit_config.find([*given, *scheduled(e1=2), "--trainer.devices", "2"]).own_gradients
    assert not fit_config.find([*given, *scheduled(e1=1), "--trainer.devices", "2"]).own_gradients

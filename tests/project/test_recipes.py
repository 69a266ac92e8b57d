"""The recipes under examples/: each runs as its documentation says, with plain Lightning's result, and says what is
wrong with what it was given before it trains on it."""

import contextlib
import gc
import importlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import urllib.error
import zlib

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI

import parity
import sp_lightning
from sp_lightning import cli
from sp_lightning.errors import SuperpipelineError

pytest.importorskip("transformers")
ROOT = pathlib.Path(__file__).parents[2]
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
DOCUMENTATION = (ROOT / "docs/recipes.md").read_text()
COMMANDS = re.findall(r"<!-- ci: recipe -->\n```bash\n(.*)\n```", DOCUMENTATION)
RECIPES = ["finetune_llm", "lora_llm", "finetune_vision", "finetune_vlm", "moe", "pretrain_small"]
RECIPES += ["distill", "prune", "moefy", "pseudo_to_real", "sweep", "diffusion", "speech", "preference"]
NEEDS = {
    "lora_llm": "peft",
    "finetune_vision": "torchvision",
    "finetune_vlm": "torchvision",
    "pretrain_small": "matplotlib",
    "sweep": "peft",
    "preference": "peft",
    "diffusion": "diffusers",
}
SLOW = pytest.mark.slow
PLAIN = "--trainer.strategy=auto"


def main(arguments):
    """Runs a command; raises the error that the command line ends with as one line."""
    try:
        cli.main(arguments)
    except SystemExit as end:
        if end.code == 2 and isinstance(end.__context__, SuperpipelineError):
            raise end.__context__ from None
        raise


@pytest.fixture(autouse=True)
def in_a_clone(tmp_path, monkeypatch):
    """The recipes where the test runs; what they write stays there too. Nothing is asked of the hub."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "argv", ["sp_lightning"])  # else LightningCLI warns that it was given two command lines
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    used = {name: given for name, given in LightningCLI.subcommands().items() if name in ("fit", "predict")}
    monkeypatch.setattr(LightningCLI, "subcommands", lambda self: used)  # each has a parser, and making it takes long


def fit(recipe, *arguments, steps=2, folder="run"):
    """Runs a recipe's config for a few steps; gives where it wrote."""
    pytest.importorskip(NEEDS.get(recipe, "transformers"))
    where = [f"--trainer.default_root_dir={folder}", f"--trainer.max_steps={steps}", *QUIET]
    main(["fit", "--config", f"examples/{recipe}/config.yaml", *where, *arguments])
    return pathlib.Path(folder)


def last(folder):
    """The checkpoint that the run left."""
    (path,) = folder.glob("lightning_logs/version_0/checkpoints/last.ckpt")
    return path


def left(folder):
    """Weights and optimizer state as the run left them."""
    checkpoint = torch.load(last(folder), weights_only=True, map_location="cpu")
    kept = {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
    return parity.Record([parity.Entry("at the end", path, leaf) for path, leaf in parity.leaves(kept)])


COMPARED_BELOW = {"prune", "pseudo_to_real"}  # in the default run too, and with more of what they do
SUMMARY = r"plain Lightning would have needed .*[0-9.]+ m?s per batch"


def command_of(recipe):
    return f"python -m sp_lightning fit --config examples/{recipe}/config.yaml"


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=SLOW if name in COMPARED_BELOW else ()) for name in RECIPES]
)
@pytest.mark.few(1)
def test_a_recipe_gives_plain_lightnings_result(recipe, capsys):
    """Run by its documented command, and says at its end what it took."""
    assert command_of(recipe) in COMMANDS
    streamed = fit(recipe, folder="streamed")
    assert re.search(SUMMARY, capsys.readouterr().out)
    parity.compare(left(fit(recipe, PLAIN, folder="plain")), left(streamed))


VARIED = [
    ["--trainer.precision=bf16-mixed"],
    ["--trainer.strategy.window=1", "--trainer.strategy.activations=keep"],
    ["--trainer.strategy.window=2", "--trainer.strategy.activations=recompute+offload"],
    ["--trainer.accumulate_grad_batches=3", "--trainer.gradient_clip_val=null"],
]


@SLOW
@pytest.mark.parametrize("arguments", VARIED, ids=lambda arguments: arguments[0].rpartition(".")[2])
@pytest.mark.parametrize("recipe", ["sweep", "diffusion", "speech", "preference"])
def test_a_recipe_gives_plain_lightnings_result_with_other_settings_too(recipe, arguments):
    streamed = fit(recipe, *arguments, folder="streamed")
    shared = [argument for argument in arguments if "strategy" not in argument]
    parity.compare(left(fit(recipe, PLAIN, *shared, folder="plain")), left(streamed))


@SLOW
@pytest.mark.simgpu
@pytest.mark.parametrize("recipe", ["sweep", "diffusion", "speech", "preference"])
def test_a_recipe_gives_plain_lightnings_result_on_a_device(recipe):
    importlib.import_module("simgpu.lightning")
    on = ["--trainer.accelerator=simgpu", "--trainer.strategy=SingleDeviceStrategy"]
    plain = fit(recipe, *on, "--trainer.strategy.device=simgpu:0", folder="plain")
    parity.compare(left(plain), left(fit(recipe, on[0], folder="streamed")))


class Halfway(L.Callback):
    """Saves in the middle."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2 and not os.path.exists("half.ckpt"):  # gradients being accumulated are not saved
            trainer.save_checkpoint("half.ckpt")


class Moved(L.Callback):
    """What streaming moved until the run ended."""

    stats: dict

    def on_train_end(self, trainer, module):
        Moved.stats = trainer.strategy.handle.stats()

    on_predict_end = on_train_end


@pytest.mark.parametrize(
    "recipe, arguments",
    [
        ("lora_llm", ["--model.dropout=0.3"]),
        pytest.param("prune", ["--model.every=1"], marks=SLOW),
        *(pytest.param(recipe, [], marks=SLOW) for recipe in RECIPES),
    ],
)
@pytest.mark.seldom
def test_a_recipe_goes_on_from_a_plain_checkpoint_as_if_it_had_not_stopped(recipe, arguments):
    halfway = "--trainer.callbacks+=test_recipes.Halfway"
    through = fit(recipe, PLAIN, halfway, *arguments, steps=4, folder="through")
    resumed = fit(recipe, "--ckpt_path=half.ckpt", *arguments, steps=4, folder="resumed")
    parity.compare(left(through), left(resumed))


RUN_ABOVE = {command_of(recipe) for recipe in RECIPES if recipe not in COMPARED_BELOW}


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=SLOW if c in RUN_ABOVE else ()) for c in COMMANDS if "sp_lightning" in c],
)
@pytest.mark.few(1)
def test_a_documented_command_runs_for_two_steps(command, capsys):
    arguments = shlex.split(command)[3:]
    for recipe, needed in NEEDS.items():
        if recipe in command:
            pytest.importorskip(needed)
    main([*arguments, "--trainer.fast_dev_run=2", *QUIET])
    assert re.search(SUMMARY, capsys.readouterr().out)


def test_a_summary_says_what_a_step_moved_and_of_how_many_batches_it_is(capsys):
    fit("finetune_llm", steps=2)
    said = r"[0-9.]+ MiB up and [0-9.]+ MiB down per step \| [0-9.]+ m?s per batch, 2 batches in a step"
    assert re.search(said, capsys.readouterr().out)


FOR_REAL = re.findall(r"```bash\n(python -m sp_lightning .*?)\n```", DOCUMENTATION.replace("\\\n", " "))


@pytest.mark.parametrize("command", sorted({*FOR_REAL} - {*COMMANDS}))
@pytest.mark.few(1)
def test_a_documented_command_for_real_names_arguments_that_there_are(command, capsys):
    """It is read, not run: its models are large."""
    with pytest.raises(SystemExit, match="0"):
        main([*shlex.split(command)[3:], "--print_config"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in shlex.split(command) if word.endswith(".jsonl") or word.startswith("meta-"))


@SLOW
@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_runs(command):
    """As it is written, but for a few steps, in a process of its own."""
    program, *arguments = shlex.split(command)
    for recipe, needed in NEEDS.items():
        if recipe in command:
            pytest.importorskip(needed)
    few = ["--steps=2"] if "-m examples." in command else ["--trainer.fast_dev_run=2"]
    done = subprocess.run([sys.executable, *arguments, *few], env=environment(), capture_output=True, text=True)
    assert program == "python" and done.returncode == 0, done.stderr
    assert re.search(SUMMARY, done.stdout)


@pytest.mark.parametrize("recipe", ["finetune_llm", *(pytest.param(name, marks=SLOW) for name in RECIPES[1:])])
def test_a_printed_config_gives_the_same_config(recipe, capsys):
    def printed(path):
        with pytest.raises(SystemExit, match="0"):
            main(["fit", "--config", path, "--print_config"])
        return capsys.readouterr().out

    first = printed(f"examples/{recipe}/config.yaml")
    pathlib.Path("printed.yaml").write_text(first)
    assert "SuperpipelineStrategy" in first and printed("printed.yaml") == first


class Held(L.Callback):
    """What a plain run holds on the device, and what is printed of it."""

    def on_train_batch_end(self, trainer, module, *_):
        from examples.common.summary import averages, plain_nbytes

        figure = plain_nbytes(module, trainer.optimizers, averages(trainer))
        Held.nbytes = torch.accelerator.memory_allocated(), figure

    on_predict_batch_end = on_train_batch_end

    def on_fit_end(self, trainer, module):
        from examples.common.summary import averages

        for average in averages(trainer):  # which would stay there
            average.cpu()


@pytest.mark.simgpu
@pytest.mark.parametrize("recipe", ["finetune_vision", "predict"])
@pytest.mark.few(1)
def test_what_plain_lightning_would_have_needed_is_what_it_holds(recipe):
    importlib.import_module("simgpu.lightning")
    plain = ["--trainer.strategy=SingleDeviceStrategy", "--trainer.strategy.device=simgpu:0"]
    arguments = ["--trainer.accelerator=simgpu", *plain, "--trainer.callbacks+=test_recipes.Held"]
    predict(*arguments) if recipe == "predict" else fit(recipe, *arguments)
    held, figure = Held.nbytes
    assert figure < held < 1.1 * figure  # tensors begin at multiples of 512 bytes; a batch is there as well


EIGHT = ["distill", "prune", "moefy", "pseudo_to_real", "sweep", "diffusion", "speech", "preference"]


@pytest.mark.parametrize("recipe", EIGHT)
def test_a_recipe_for_an_idea_of_others_is_small(recipe):
    for path in (ROOT / "examples" / recipe).glob("*.py"):
        assert len(path.read_text().splitlines()) <= 200, path


def test_every_recipe_has_its_command_in_the_documentation():
    named = {part for command in COMMANDS for part in re.split(r"[/. ]", command)}
    folders = {path.parent.name for path in (ROOT / "examples").glob("*/*.py")}
    assert folders - named == {"common"}


# ---- the language model's recipe


def write(path, *records):
    """A JSONL file; text is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    pathlib.Path(path).write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory):
    """A checkpoint directory in several shards, and a tokenizer that was trained on the spot."""
    sys.path.insert(0, str(ROOT))
    from examples.common import tiny

    path = tmp_path_factory.mktemp("tiny") / "llm"
    tiny.made(path, tiny.language_model)
    sys.path.remove(str(ROOT))
    assert len(list(path.glob("*.safetensors"))) == 3
    return path


@pytest.fixture
def words(tiny_llm):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llm)


def logits(folder):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.arange(24)[None]).logits


def test_what_is_exported_gives_the_logits_of_the_model_in_memory(tiny_llm, monkeypatch):
    from examples.finetune_llm.module import FineTuneLLM

    kept = []
    monkeypatch.setattr(FineTuneLLM, "on_fit_end", lambda self: kept.append(self.model), raising=False)
    before = logits(tiny_llm)
    data = write("my.jsonl", *({"text": f"The owl sees {i} stones."} for i in range(30)))
    run = fit("finetune_llm", f"--model.name_or_path={tiny_llm}", f"--data.path={data}")
    with torch.no_grad():
        expected = kept[0].eval()(torch.arange(24)[None]).logits
    assert torch.equal(logits(run / "model"), expected) and not torch.equal(expected, before)
    assert torch.equal(logits(tiny_llm), before)  # training wrote its own memory, not the files that were mapped


def test_documents_that_share_a_block_do_not_see_each_other(tiny_llm, words):
    from transformers import AutoModelForCausalLM

    from examples.common.text import collate, encode, pack

    model = AutoModelForCausalLM.from_pretrained(tiny_llm).eval()
    texts = ["The owl sees a stone.", "And then a boat, which is red."]
    one, two = (encode({"text": text}, words, "here") for text in texts)
    together, alone = collate(pack([one, two], 64, 0)), collate(pack([two], 64, 0))
    count, at = len(two.tokens), len(one.tokens)
    together, alone = (model(**batch, use_cache=False).logits[0] for batch in (together, alone))
    torch.testing.assert_close(together[at : at + count], alone[:count])


def test_packing_is_tried_on_the_model_and_refused_where_documents_see_each_other():
    from transformers import OPTConfig, OPTForCausalLM

    from examples.common.errors import BadInput
    from examples.common.packing import check_apart

    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_attention_heads": 2}
    model = OPTForCausalLM(OPTConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    said = r"in OPTForCausalLM packed documents see each other: with another one before it, .*; set data.packing=false"
    with pytest.raises(BadInput, match=said):
        check_apart(model, torch.device("cpu"))
    assert model.training


def test_packing_keeps_every_token_and_learns_no_document_from_the_one_before():
    from examples.common.text import IGNORED, Document, pack

    rows = pack([Document([1, 2, 3], [1, 2, 3]), Document([4], [4]), Document([5, 6], [5, 6])], 5, filler=0)
    assert [row["input_ids"] for row in rows] == [[1, 2, 3, 4, 0], [5, 6, 0, 0, 0]]
    assert [row["position_ids"] for row in rows] == [[0, 1, 2, 0, 0], [0, 1, 0, 1, 2]]
    no = IGNORED
    assert [row["labels"] for row in rows] == [[no, 2, 3, no, no], [no, 6, no, no, no]]


def test_of_a_chat_what_the_assistant_says_is_learned(words):
    from examples.common.text import IGNORED, encode

    turns = [
        ("system", "Be kind."),
        ("user", "Hello"),
        ("assistant", "Hi!"),
        ("user", "Bye"),
        ("assistant", "Farewell."),
    ]
    document = encode({"messages": [{"role": r, "content": c} for r, c in turns]}, words, "here")
    learned = [token for token, label in zip(document.tokens, document.labels, strict=True) if label != IGNORED]
    assert words.decode(learned) == "Hi!</s>Farewell.</s>"
    assert all(label in (IGNORED, token) for token, label in zip(document.tokens, document.labels, strict=True))


def test_of_a_prompt_the_completion_is_learned(words):
    from examples.common.text import IGNORED, encode

    document = encode({"prompt": "2 plus 2 is", "completion": " 4."}, words, "here")
    assert words.decode([label for label in document.labels if label != IGNORED]) == " 4.</s>"


def test_of_a_chat_that_the_assistant_begins_its_first_words_are_learned(words):
    from examples.common.text import IGNORED, encode

    turns = [{"role": role, "content": role.upper()} for role in ("assistant", "user", "assistant")]
    document = encode({"messages": turns}, words, "here")
    learned = [token for token in document.labels if token != IGNORED]
    assert words.decode(learned) == "<|assistant|>ASSISTANT</s>ASSISTANT</s>"


def test_rows_of_which_nothing_is_learned_are_left_out(tiny_llm, caplog):
    """Their loss would be 0 / 0."""
    cut_off = {"prompt": "The owl sees " * 40, "completion": "a stone."}
    data = write("my.jsonl", *[GOOD] * 6, *[cut_off] * 6)
    arguments = "--data.packing=false", "--data.block_size=32", "--data.batch_size=1"
    run = fit("finetune_llm", f"--model.name_or_path={tiny_llm}", f"--data.path={data}", *arguments, steps=3)
    assert "6 of 12 rows of my.jsonl are left out: nothing in them is learned" in caplog.text
    assert all(tensor.isfinite().all() for tensor in torch.load(last(run), weights_only=True)["state_dict"].values())


# ---- the loss in chunks

CHUNKED = pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch 2.15 computes it")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def causal(kind, **config):
    """A tiny model of this family."""
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES | config))


def rows(count=3, length=12):
    """Tokens, some of which are not learned."""
    tokens = torch.randint(1, 96, (count, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, -100)}


def said_of(model, batch=None):
    from examples.common.loss import why_not

    return why_not(model, batch or rows())


@CHUNKED
@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=SLOW)])
@pytest.mark.parametrize("recipe", ["finetune_llm", "pretrain_small", "moe", "finetune_vlm", "lora_llm"])
@pytest.mark.few(1)
def test_the_loss_in_chunks_is_plain_lightnings_too(recipe, precision, monkeypatch):
    """A Llama, one with a tied head, a mixture, a model of images and texts, adapters."""
    from examples.common import loss

    taken, in_chunks = [], loss.in_chunks
    monkeypatch.setattr(loss, "in_chunks", lambda *given: taken.append(given) or in_chunks(*given))
    arguments = ["--model.loss=chunked", f"--trainer.precision={precision}"]
    streamed = fit(recipe, *arguments, folder="streamed")
    by_streaming = len(taken)
    parity.compare(left(fit(recipe, PLAIN, *arguments, folder="plain")), left(streamed))
    assert len(taken) == 2 * by_streaming > 0


@CHUNKED
@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=SLOW)])
def test_a_model_that_is_left_with_all_its_logits_is_plain_lightnings_too(precision, words, monkeypatch, caplog):
    from examples.common import loss

    monkeypatch.setattr(loss, "LARGE", 96)
    causal("Gemma2", head_dim=8, vocab_size=len(words), max_position_embeddings=256).save_pretrained("gemma")
    words.save_pretrained("gemma")
    arguments = ["--model.name_or_path=gemma", "--data.packing=false", f"--trainer.precision={precision}"]
    streamed = fit("finetune_llm", *arguments, folder="streamed")
    plain = fit("finetune_llm", PLAIN, *arguments, folder="plain")
    parity.compare(left(plain), left(streamed))
    assert caplog.text.count("Gemma2ForCausalLM does more to its logits") == 2


@CHUNKED
@pytest.mark.parametrize(
    "kind, config",
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Gemma2", {"final_logit_softcapping": None, "head_dim": 8}),
        ("Granite", {"logits_scaling": 1.0}),
        ("Mixtral", {"num_local_experts": 4}),
        ("Phi", {}),  # whose head has a bias
    ],
)
def test_the_loss_in_chunks_is_the_models_own(kind, config):
    from examples.common.loss import in_chunks

    model, batch = causal(kind, **config), rows()
    assert said_of(model) is None
    own, chunked = model(**batch, use_cache=False).loss, in_chunks(model, batch)
    torch.testing.assert_close(chunked, own)
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected, found = (torch.autograd.grad(loss, parameters) for loss in (own, chunked))
    for name, one, other in zip(names, expected, found, strict=True):
        torch.testing.assert_close(other, one, msg=lambda text, name=name: f"{name}: {text}", rtol=1e-4, atol=1e-6)


@CHUNKED
@pytest.mark.parametrize("count, length", [(1, 2), (1, 7), (5, 13)])
def test_rows_of_any_number_are_cut_into_chunks(count, length):
    from examples.common.loss import in_chunks

    model, batch = causal("Llama"), rows(count, length)
    batch["labels"][:] = batch["input_ids"]
    torch.testing.assert_close(in_chunks(model, batch), model(**batch).loss)


@CHUNKED
def test_where_nothing_is_learned_the_loss_in_chunks_is_the_models_own_nan():
    from examples.common.loss import in_chunks

    model, batch = causal("Llama"), rows()
    batch["labels"][:] = -100
    assert in_chunks(model, batch).isnan() and model(**batch).loss.isnan()


@CHUNKED
def test_in_half_precision_the_loss_in_chunks_is_as_exact_as_the_models_own():
    """torch's own mean is added up in bf16, and off by 2 %; a scaler's factor would be infinite in FP16."""
    from examples.common.loss import in_chunks

    model, batch = causal("Llama", vocab_size=2048), rows(16, 60)
    exact = model(**batch).loss
    for dtype, near in ((torch.bfloat16, 2e-3), (torch.float16, 3e-4)):
        with torch.autocast("cpu", dtype, cache_enabled=False):
            loss = in_chunks(model, batch)
        assert loss.dtype is torch.float32 and abs(loss - exact) < near * exact
        (loss * 2.0**17).backward()
        assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
        model.zero_grad()


@CHUNKED
@pytest.mark.parametrize(
    "kind, config, said",
    [
        ("Gemma2", {"head_dim": 8}, "Gemma2ForCausalLM does more to its logits than its head's weight does"),
        ("Granite", {"logits_scaling": 8.0}, "GraniteForCausalLM does more to its logits"),
        ("Cohere", {"logit_scale": 0.5}, "CohereForCausalLM does more to its logits"),
        (
            "Mixtral",
            {"num_local_experts": 4, "output_router_logits": True},
            "the loss of MixtralForCausalLM is not the cross entropy of its logits alone",
        ),
    ],
)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_what_else_a_head_or_a_loss_does_is_found_and_named(kind, config, said, precision):
    with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
        assert said in said_of(causal(kind, **config))


@CHUNKED
def test_a_head_that_is_no_linear_layer_is_named():
    class Louder(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = causal("Llama")
    model.lm_head.__class__ = Louder
    assert "Louder, not an nn.Linear" in said_of(model)
    model = causal("Llama")
    model.lm_head.register_forward_hook(lambda module, args, made: made * 2)
    assert "does more to its logits" in said_of(model)
    model = causal("Llama")
    model.model.register_forward_pre_hook(lambda module, args: None)
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,), prepend=True)
    assert "is given something else than what its base model returns" in said_of(model)
    model = torch.compile(causal("Llama"))
    assert said_of(model).endswith("is compiled")
    assert "num_items_in_batch, which are for the model's own" in said_of(
        causal("Llama"), rows() | {"num_items_in_batch": torch.tensor(3)}
    )


@CHUNKED
def test_a_head_with_an_adapter_is_named():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(causal("Llama"), peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    assert said_of(adapted) == "the head of LlamaForCausalLM is a peft.tuners.lora.layer.Linear, not an nn.Linear"


@CHUNKED
def test_trying_a_model_leaves_its_dropout_as_it_was_drawn():
    model = causal("Llama", attention_dropout=0.5).train()
    torch.manual_seed(2)
    expected = torch.rand(3)
    torch.manual_seed(2)
    assert said_of(model) is None and model.training and torch.equal(torch.rand(3), expected)


@CHUNKED
def test_auto_takes_chunks_where_the_vocabulary_is_large_and_says_once_why_not(monkeypatch, caplog):
    from examples.common import loss

    for model, chunked in ((causal("Llama"), True), (causal("Gemma2", head_dim=8), False)):
        tokens = loss.NextTokens("auto")
        tokens(model, rows())
        assert tokens.chunked is False and not caplog.text
        monkeypatch.setattr(loss, "LARGE", 96)
        tokens = loss.NextTokens("auto")
        for _ in range(2):
            value = tokens(model, rows())
        assert tokens.chunked is chunked
        assert torch.equal(value, loss.in_chunks(model, rows()) if chunked else model(**rows()).loss)
        monkeypatch.undo()
    assert caplog.text.count("the loss is computed from the logits of all tokens at once: Gemma2ForCausalLM does") == 1


def test_an_older_torch_takes_no_chunks(monkeypatch, caplog):
    from examples.common import loss
    from examples.common.errors import BadInput

    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    monkeypatch.setattr(loss, "LARGE", 96)
    model = causal("Llama")
    assert torch.equal(loss.NextTokens("auto")(model, rows()), model(**rows()).loss)
    said = r"computes none in chunks, torch 2.15 does \(pip install 'torch>=2.15'\)"
    with pytest.raises(BadInput, match=rf"model.loss=chunked: torch .* {said}; set model.loss=full, or leave it at"):
        loss.NextTokens("chunked")(model, rows())


@CHUNKED
def test_a_graph_of_the_backward_is_refused_instead_of_missing():
    from examples.common.errors import BadInput
    from examples.common.loss import in_chunks

    model = causal("Llama")
    with pytest.raises(BadInput, match=r"create_graph=True\) needs all logits at once: set model.loss=full"):
        in_chunks(model, rows()).backward(create_graph=True)


def test_a_file_as_windows_writes_it_is_read():
    from examples.common.files import read_jsonl

    pathlib.Path("my.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "\xc3\xbc"}\r\n')
    assert [record["text"] for _, record in read_jsonl("my.jsonl")] == ["a", "\u00fc"]


GOOD = {"text": "The owl sees a stone."}
DEEP = '{"text": ' + "[" * 100_000


def chat(*contents):
    return {"messages": [{"role": role, "content": content} for role, content in zip("ua" * 9, contents, strict=False)]}


@pytest.mark.parametrize(
    "records, said",
    [
        ([GOOD, GOOD, '{"text": "The'], r"bad.jsonl, line 3 is not JSON: .* at column 10; nothing was trained"),
        ([GOOD, "[1, 2]"], "bad.jsonl, line 2 is a JSON list, not an object; nothing was trained"),
        ([GOOD, {"txt": "a"}], r"""bad.jsonl, line 2 has the keys \['txt'\]; a record needs "text", or"""),
        ([{"messages": [{"role": "user", "content": "?"}]}], "line 1 is a chat in which the assistant says nothing"),
        (
            [{"messages": [{"role": "assistant", "content": None}]}],
            r"line 1 has the keys \['messages'\]; .* all texts\)",
        ),
        ([GOOD, '{"text": "half \\ud83d"}'], r"line 2 holds half of a character: '\\ud83d'; nothing was trained"),
        ([GOOD, DEEP], "bad.jsonl, line 2 is nested too deeply; nothing was trained"),
        (
            [{"text": ""}],
            "bad.jsonl has nothing to learn: no completion or answer begins within the first data.block_s",
        ),
        ([""], "bad.jsonl holds no records"),
    ],
)
@pytest.mark.few(1)
def test_a_malformed_line_is_named_and_nothing_is_trained(records, said, tiny_llm):
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=said):
        fit("finetune_llm", f"--model.name_or_path={tiny_llm}", f"--data.path={write('bad.jsonl', *records)}")
    assert not pathlib.Path("run/model").exists()


@pytest.mark.parametrize(
    "argument, said",
    [
        ("--data.path=none.jsonl", r"the data file none.jsonl does not exist \(looked from /"),
        ("--data.path=.", r"the data file \. is a folder, not a file"),
        (
            "--data.block_size=512",
            "data.block_size=512 is more than the 256 positions of the model of .*; set it to 256",
        ),
        ("--data.block_size=1", "data.block_size=1: of fewer than 2 tokens nothing can be predicted"),
        ("--model.dtype=floaty", "model.dtype=floaty is no type of weights"),
        ("--model.name_or_path=./none", "the tokenizer's directory none does not exist"),
    ],
)
@pytest.mark.few(1)
def test_an_argument_that_can_not_be_used_is_named(argument, said):
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=said):
        fit("finetune_llm", argument)


def test_a_model_needs_no_weights_where_tensors_are_fake(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from examples.common import checkpoints

    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    transformers.LlamaConfig(**sizes, vocab_size=9).save_pretrained(tmp_path)
    with FakeTensorMode():  # as a plan makes it
        model = checkpoints.load(transformers.AutoModelForCausalLM, str(tmp_path))
    assert type(model) is transformers.LlamaForCausalLM and model.training


def test_what_transformers_can_not_read_is_named():
    from transformers import AutoConfig

    from examples.common.checkpoints import read
    from examples.common.errors import BadInput

    pathlib.Path("broken").mkdir()
    pathlib.Path("broken/config.json").write_text("{")
    with pytest.raises(
        BadInput, match=r"the checkpoint directory broken can not be read \(looked from /.*not a valid JSON"
    ):
        read(AutoConfig, "broken")


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(tiny_llm, words):
    from examples.common.errors import BadInput

    words.add_tokens(["owl-like"])
    words.save_pretrained("larger")
    said = rf"the tokenizer of larger has {len(words)} tokens, but the model of {tiny_llm} embeds {len(words) - 1}"
    with pytest.raises(BadInput, match=said):
        fit("finetune_llm", f"--model.name_or_path={tiny_llm}", "--data.tokenizer=larger")


def test_a_checkpoint_without_a_tokenizer_is_refused(tiny_llm, tmp_path):
    from examples.common.errors import BadInput

    bare = tmp_path / "bare"
    shutil.copytree(tiny_llm, bare, ignore=shutil.ignore_patterns("token*", "*.jinja"))
    with pytest.raises(BadInput, match=rf"the tokenizer's directory {bare} can not be read"):
        fit("finetune_llm", f"--model.name_or_path={bare}")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    with pytest.raises(BadInput, match=rf"there is no tokenizer in {bare}; save the model's there too"):
        fit("finetune_llm", f"--model.name_or_path={bare}")


def test_a_checkpoint_that_reads_no_images_is_refused(tiny_llm):
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=rf"{tiny_llm} has no processor of images and texts; examples/finetune_llm"):
        fit("finetune_vlm", f"--model.name_or_path={tiny_llm}")


def test_a_line_that_is_not_utf8_is_named():
    from examples.common.errors import BadInput
    from examples.common.files import read_jsonl

    pathlib.Path("my.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(BadInput, match=r"my.jsonl, line 2 is not UTF-8: byte 14 is 0xe9; nothing was trained"):
        read_jsonl("my.jsonl")


def test_a_chat_template_that_refuses_is_named(words):
    from examples.common.errors import BadInput
    from examples.common.text import encode

    words.chat_template = "{{ raise_exception('roles must alternate') }}"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    with pytest.raises(
        BadInput, match=r"my.jsonl, line 7: the tokenizer's chat template refuses .*roles must alternate"
    ):
        encode({"messages": turns}, words, "my.jsonl, line 7")


def test_special_tokens_that_only_a_familys_models_with_images_embed_are_no_reason_to_refuse(tiny_llm, words):
    from examples.common.errors import BadInput

    words.add_special_tokens({"extra_special_tokens": ["<image>"]})
    words.save_pretrained("larger")
    arguments = f"--model.name_or_path={tiny_llm}", "--data.tokenizer=larger"
    fit("finetune_llm", *arguments, f"--data.path={write('good.jsonl', GOOD)}", steps=1)
    with pytest.raises(
        BadInput, match=rf"bad.jsonl, line 2 holds the token '<image>' \({len(words) - 1}\), but the mo"
    ):
        fit("finetune_llm", *arguments, f"--data.path={write('bad.jsonl', GOOD, {'text': 'an <image>'})}")


def test_a_checkpoint_without_some_of_the_weights_is_refused(tiny_llm, words):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from examples.common.errors import BadInput

    AutoModelForCausalLM.from_pretrained(tiny_llm).save_pretrained("less")
    words.save_pretrained("less")
    weights = load_file("less/model.safetensors")
    save_file({n: w for n, w in weights.items() if "layers.2." not in n}, "less/model.safetensors", {"format": "pt"})
    with pytest.raises(
        BadInput, match=r"less lacks 9 of the weights of LlamaForCausalLM, which would begin at random: mo"
    ):
        fit("finetune_llm", "--model.name_or_path=less")


@pytest.mark.seldom
def test_packing_is_refused_for_a_model_that_can_not_tell_documents_apart(tiny_llm, words):
    from transformers import BloomConfig, BloomForCausalLM

    from examples.common.errors import BadInput

    config = BloomConfig(vocab_size=len(words), hidden_size=16, n_layer=2, n_head=2)
    BloomForCausalLM(config).save_pretrained("bloom")
    words.save_pretrained("bloom")
    with pytest.raises(BadInput, match=r"BloomForCausalLM takes no position_ids, .* set data.packing=false"):
        fit("finetune_llm", "--model.name_or_path=bloom")
    assert (fit("finetune_llm", "--model.name_or_path=bloom", "--data.packing=false") / "model").is_dir()


def test_an_export_that_fails_leaves_the_previous_one_whole(tmp_path):
    from examples.common.files import whole

    before = tmp_path / "model"
    before.mkdir()
    (before / "weights").write_text("trained")
    with pytest.raises(OSError, match="No space left"), whole(before) as part:
        part.mkdir()
        (part / "weights").write_text("half")
        raise OSError("No space left on device")
    assert (before / "weights").read_text() == "trained" and list(tmp_path.iterdir()) >= [before]
    assert not list(tmp_path.glob("model.*"))


LOADING = """
import os, pathlib, re, sys, threading, time
import torch
sys.path.insert(0, sys.argv[1])
import lightning as L
import sp_lightning
from examples.common import checkpoints
from transformers import AutoModelForCausalLM, LlamaForCausalLM


def own():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])


before, peaks = own(), [0]
done = threading.Event()
def watch():
    while not done.wait(0.001):
        peaks.append(own())
watcher = threading.Thread(target=watch)
watcher.start()
model = checkpoints.load(AutoModelForCausalLM, "large")
loaded = max(peaks) - before
with sp_lightning.stream(model, "cpu", window=1):
    done.set()
    watcher.join()
    print(sum(p.nbytes for p in model.parameters()), loaded, max(peaks) - before)
"""


@SLOW
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_weights_are_in_memory_once_while_they_are_read_and_while_streaming_begins():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "vocab_size": 256}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=16, **sizes)).save_pretrained("large", max_shard_size="8MB")
    done = subprocess.run([sys.executable, "-c", LOADING, ROOT], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    weights, loaded, streaming = map(int, done.stdout.split())
    assert loaded < weights / 4 and weights < streaming < 1.25 * weights


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# ---- adapters


def test_of_a_frozen_base_nothing_travels_down(tiny_llm):
    run = fit("lora_llm", f"--model.name_or_path={tiny_llm}", "--trainer.callbacks+=test_recipes.Moved")
    adapters = torch.load(last(run), weights_only=True)["state_dict"]
    assert all("lora_" in name for name in adapters)  # which alone are saved, too
    batches = 4
    assert Moved.stats["bytes_down"] == batches * sum(tensor.nbytes for tensor in adapters.values())


@pytest.mark.seldom
def test_adapters_train_beside_a_base_that_stays_in_its_checkpoint(tiny_llm):
    base, moved = f"--model.name_or_path={tiny_llm}", "--trainer.callbacks+=test_recipes.Moved"
    filed = fit("lora_llm", base, moved, "--model.dtype=auto", "--trainer.strategy.host_budget=0B", folder="filed")
    assert Moved.stats["disk_read"] > 0.9 * sum(path.stat().st_size for path in tiny_llm.glob("*.safetensors"))
    plain = fit("lora_llm", base, PLAIN, "--model.dtype=auto", folder="plain")
    parity.compare(left(plain), left(filed))


@pytest.mark.seldom
def test_exported_adapters_give_the_logits_of_the_model_in_memory(tiny_llm, monkeypatch):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from examples.lora_llm.module import LoraLLM

    kept = []
    monkeypatch.setattr(LoraLLM, "on_fit_end", lambda self: kept.append(self.model), raising=False)
    run = fit("lora_llm", f"--model.name_or_path={tiny_llm}")
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llm), run / "adapters")
    with torch.no_grad():
        mine, theirs = (model.eval()(torch.arange(24)[None]).logits for model in (kept[0], loaded))
    assert torch.equal(mine, theirs) and not torch.equal(mine, logits(tiny_llm))


LIBRARY_OF = {8: "bitsandbytes", 4: "bitsandbytes", **dict.fromkeys(("int8", "float8", "nf4", "nvfp4"), "torchao")}


@pytest.mark.parametrize("bits", [8, *(pytest.param(bits, marks=SLOW) for bits in (4, "int8", "nf4", "nvfp4"))])
@pytest.mark.seldom
def test_a_packed_base_sends_its_packed_bytes_and_gives_plain_lightnings_result(bits, tiny_llm):
    pytest.importorskip(LIBRARY_OF[bits])
    base, moved = f"--model.name_or_path={tiny_llm}", "--trainer.callbacks+=test_recipes.Moved"
    fit("lora_llm", base, moved)
    unpacked = Moved.stats["bytes_up"]
    streamed = fit("lora_llm", base, moved, f"--model.base_bits={bits}", folder="streamed")
    assert Moved.stats["bytes_up"] < unpacked / 2
    plain = fit("lora_llm", base, PLAIN, f"--model.base_bits={bits}", folder="plain")
    parity.compare(left(plain), left(streamed))


class HostWeights(Moved):
    """What weights took on the host."""

    nbytes: int

    def on_train_end(self, trainer, module):
        HostWeights.nbytes = sum(unit.host_bytes().weights for unit in trainer.strategy.handle.engine.units)


@pytest.mark.parametrize(
    "bits", ["nf4", *(pytest.param(bits, marks=SLOW) for bits in (8, 4, "int8", "float8", "nvfp4"))]
)
@pytest.mark.seldom
def test_a_plan_of_a_packed_base_is_made_without_weights_and_counts_its_bytes(bits, tiny_llm):
    pytest.importorskip(LIBRARY_OF[bits])
    given = f"--model.name_or_path={tiny_llm}", f"--model.base_bits={bits}"
    with contextlib.suppress(SystemExit):
        main(["plan", "--config", "examples/lora_llm/config.yaml", *given, "--json", "plan.json"])
    fit("lora_llm", *given, "--trainer.callbacks+=test_recipes.HostWeights")
    planned = json.loads(pathlib.Path("plan.json").read_text())["host"]["weights"]
    assert planned == pytest.approx(HostWeights.nbytes, rel=0.05)


def test_the_command_that_a_plan_suggests_for_a_base_of_4_bits_runs(tiny_llm):
    pytest.importorskip("bitsandbytes")
    from sp_lightning.core import remedies

    listed = remedies.host(half=False, wires=False, activations="keep", optimizer="AdamW")
    (remedy,) = [remedy for remedy in listed if remedy.base_bits == 4]
    write("my.jsonl", *({"text": "The owl sees the mouse."} for _ in range(40)))
    filled = remedy.how.replace("MODEL", str(tiny_llm)).replace("TOKENS", "16").replace("ROWS", "2")
    python, module, package, *arguments = filled.split()
    assert (python, module, package) == ("python", "-m", "sp_lightning")
    main([*arguments, "--trainer.max_steps=2", "--trainer.callbacks+=test_recipes.Moved", *QUIET])
    assert Moved.stats["bytes_up"] > 0


FROZEN = {"finetune_vlm": "connection", "diffusion": "adapters", "speech": "adapters"}


@pytest.mark.parametrize("recipe", FROZEN)
@pytest.mark.parametrize("bits", ["int8", pytest.param("nf4", marks=SLOW), pytest.param(4, marks=SLOW)])
@pytest.mark.seldom
def test_other_recipes_train_beside_a_packed_base_as_plain_lightning_does(bits, recipe):
    pytest.importorskip(LIBRARY_OF[bits])
    given = [f"--model.train={FROZEN[recipe]}", "--trainer.callbacks+=test_recipes.Moved", "--model.lr=1e-3"]
    fit(recipe, *given, folder="unpacked")
    unpacked = Moved.stats["bytes_up"]
    given.append(f"--model.base_bits={bits}")
    streamed = fit(recipe, *given, folder="streamed")
    assert Moved.stats["bytes_up"] < 0.75 * unpacked
    parity.compare(left(fit(recipe, given[0], *given[2:], PLAIN, folder="plain")), left(streamed))


@pytest.mark.parametrize("recipe", FROZEN)
@pytest.mark.few(1)
def test_a_packed_base_cannot_be_trained(recipe):
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=f"base_bits=int8 packs weights that are frozen: use train={FROZEN[recipe]}"):
        fit(recipe, "--model.train=all", "--model.base_bits=int8")


@pytest.mark.parametrize(("form", "name"), [(4, "bitsandbytes"), ("nf4", "torchao")])
def test_without_its_library_a_packed_base_is_an_error_that_says_what_to_install(form, name, monkeypatch):
    from examples.common import quantized
    from examples.common.errors import BadInput

    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=f"base_bits={form} needs {name}, which is not installed: pip install {name}"):
        quantized.quantize(torch.nn.Linear(2, 2), form)


def test_a_layer_that_a_form_does_not_fit_is_named():
    pytest.importorskip("torchao")
    from examples.common import quantized
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=r"base_bits=nf4 cannot pack 0, of shape \(3, 3\)"):
        quantized.quantize(torch.nn.Sequential(torch.nn.Linear(3, 3)), "nf4")


def test_a_model_in_which_nothing_would_be_packed_is_refused(monkeypatch):
    from examples.common import quantized
    from examples.common.errors import BadInput

    monkeypatch.setattr(quantized, "library", lambda form: None)
    with pytest.raises(BadInput, match=r"base_bits=4 packs nn.Linear, of which Sequential has none but its head"):
        quantized.quantize(torch.nn.Sequential(head := torch.nn.Linear(2, 2)), 4, leave=[head])


# ---- a student and its teacher


@pytest.mark.seldom
def test_of_a_teacher_nothing_travels_down_or_is_saved():
    run = fit("distill", "--trainer.callbacks+=test_recipes.Moved", "--model.match=both")
    saved = torch.load(last(run), weights_only=True)["state_dict"]
    assert {name.partition(".")[0] for name in saved} == {"model", "projection"}
    assert Moved.stats["bytes_down"] == 2 * sum(tensor.nbytes for tensor in saved.values())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data.packing=false", "--model.on_policy=0.5", "--model.max_new_tokens=4", "--trainer.strategy.window=1"],
        pytest.param(
            ["--model.match=both", "--trainer.precision=bf16-mixed", "--trainer.accumulate_grad_batches=2"], marks=SLOW
        ),
        pytest.param(["--model.match=hidden", "--trainer.strategy.activations=keep"], marks=SLOW),
    ],
)
@pytest.mark.seldom
def test_a_student_learns_as_with_plain_lightning(arguments):
    on_plain = [argument for argument in arguments if "strategy" not in argument]
    streamed, plain = fit("distill", *arguments, folder="streamed"), fit("distill", PLAIN, *on_plain, folder="plain")
    parity.compare(left(plain), left(streamed))


def test_a_students_distance_is_none_from_itself_and_one_block_is_compared_with_the_last_of_two():
    from examples.distill.module import Distill

    same, module = torch.randn(3, 7), Distill()
    assert module.divergence(same, same) == 0 and module.divergence(same, -same) > 0
    blocks, read = (torch.randn(2, 3, 4), torch.randn(2, 3, 4)), torch.ones(2, 3, dtype=torch.bool)
    assert module.between_blocks(blocks[1:], blocks, read) == 0 < module.between_blocks(blocks[:1], blocks, read)


@SLOW
def test_a_student_comes_nearer_to_its_teacher(capsys):
    for steps in (1, 40):
        fit("distill", steps=steps, folder=str(steps))
    short, long = re.findall(r"^loss ([0-9.]+)", capsys.readouterr().out, re.MULTILINE)
    assert float(long) < 0.9 * float(short)


def test_a_student_writes_after_its_prompts_and_learns_its_own_words(tiny_llm):
    from types import SimpleNamespace

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.distill.module import Distill

    module = Distill(on_policy=1.0, max_new_tokens=3)
    module.model = AutoModelForCausalLM.from_pretrained(tiny_llm)
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(tiny_llm)))
    labels = torch.tensor([[-100, -100, 7, 8], [-100, 6, 7, -100]])
    made = module.written({"input_ids": torch.tensor([[4, 5, 7, 8], [9, 6, 7, 0]]), "labels": labels})
    assert made["input_ids"][:, :2].tolist()[0] == [4, 5] and made["input_ids"][1, 0] == 9 and module.model.training
    for ids, mask, learned, prompt in zip(
        *(made[name].tolist() for name in ("input_ids", "attention_mask", "labels")), (2, 1), strict=True
    ):
        said = sum(mask) - prompt
        assert 1 <= said <= 3 and learned == [-100] * prompt + ids[prompt : sum(mask)] + [-100] * (len(ids) - sum(mask))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"on_policy": 0.5}, "model.on_policy needs data.packing=false"),
        ({"own": 2}, "model.own=2 is a share, from 0 to 1"),
        ({"temperature": 0}, "model.temperature=0 has to be more than 0"),
    ],
)
def test_a_lesson_that_can_not_be_given_is_named(options, said):
    from types import SimpleNamespace

    from examples.common.errors import BadInput
    from examples.distill.module import Distill

    module = Distill(**options)
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(packing=True))
    with pytest.raises(BadInput, match=said):
        module.configure_model()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model.teacher=other"], "the tokenizer of model.teacher=other has other tokens than that of"),
        pytest.param(["--model.teacher=./none"], "directory none does not exist", marks=SLOW),
        pytest.param(
            ["--model.on_policy=0.5", "--data.packing=false", "--data.block_size=250"],
            r"rows of 282 tokens .* are more than the 256 positions",
            marks=SLOW,
        ),
    ],
)
def test_a_teacher_that_can_not_teach_is_named(arguments, said, tiny_llm, words):
    from examples.common.errors import BadInput

    shutil.copytree(tiny_llm, "other")
    words.add_tokens(["owl-like"])
    words.save_pretrained("other")
    config = json.loads(pathlib.Path("other/config.json").read_text())
    pathlib.Path("other/config.json").write_text(json.dumps({**config, "vocab_size": len(words)}))
    with pytest.raises(BadInput, match=said):
        fit("distill", f"--model.name_or_path={tiny_llm}", *arguments)


# ---- few weights of many


def sparse_layer():
    from examples.prune.sparse import SparseLinear, renew

    layer = torch.nn.Linear(4, 2, bias=False)
    layer.weight.data = torch.tensor([[8.0, -7.0, 1.0, 2.0], [-6.0, 5.0, 3.0, -4.0]])
    SparseLinear.of(layer, penalty=0.5)
    renew(layer, 0.25, 0.5)
    return layer


def test_a_sparse_layer_uses_its_largest_weights_and_learns_a_few_more():
    from examples.prune.sparse import block_of, renew

    names = ("model.layers.1.mlp.up_proj", "h.0.attn", "", "wte")
    assert [block_of(name) for name in names] == ["model.layers.1", "h.0", "", "wte"]
    layer, saved = sparse_layer(), sparse_layer().state_dict()
    renew(layer, 1.0, 1.0)
    layer.load_state_dict(saved)  # as a resumed run does
    assert layer.codes.tolist() == [[2, 2, 0, 0], [1, 1, 0, 0]]
    assert torch.equal(layer(torch.eye(4)).T, torch.tensor([[8.0, -7.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    layer(torch.ones(1, 4)).sum().backward()
    # A gradient of 1, and half of the weight; of those that are not used, times 1 / 0.25.
    assert layer.weight.grad.tolist() == [[1 + 4.0, 1 - 3.5, 0, 0], [1 - 12.0, 1 + 10.0, 0, 0]]


def test_a_weight_that_grows_comes_to_be_used_with_the_value_that_it_kept():
    from examples.prune.sparse import renew

    layer = sparse_layer()
    layer.weight.data[1, 0] = -9.0
    assert layer(torch.eye(4)).T[1, 0] == 0
    renew(layer, 0.25, 0.5)
    assert layer(torch.eye(4)).T[1, 0] == -9 and layer.codes.tolist() == [[2, 1, 0, 0], [2, 1, 0, 0]]


def test_the_share_of_weights_falls_fast_at_first():
    from examples.prune.module import Prune

    module = Prune(density=0.2, backward_density=0.5, ramp_steps=10)
    assert [module.shares(step) for step in (0, 10, 99)] == [(1.0, 1.0), (0.2, 0.5), (0.2, 0.5)]
    assert module.shares(5) == (0.2 + 0.8 / 8, 0.5) and Prune(density=0.2).shares(0) == (0.2, 0.2)


def test_kept_weights_are_counted_with_their_bits():
    from examples.prune.module import kept_share
    from examples.prune.sparse import LEARNED, USED

    layer, other = sparse_layer(), torch.nn.Parameter(torch.zeros(10))
    up, down = {layer.weight, layer.codes, other}, {layer.weight, other}
    assert kept_share([layer], up, USED, 2) == (2 * 4 + 8 * 2 / 8 + 40) / (8 * 4 + 8 + 40)
    assert kept_share([layer], down, LEARNED, 1) == (4 * 4 + 8 / 8 + 40) / (8 * 4 + 40)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model.every=1"],
        pytest.param(
            [
                *("--model.every=1", "--trainer.precision=bf16-mixed", "--trainer.accumulate_grad_batches=2"),
                "--trainer.strategy.window=1",
            ],
            marks=SLOW,
        ),
        pytest.param(
            [
                *("--model.every=2", "--model.ramp_steps=4", "--model.backward_density=null"),
                *("--trainer.gradient_clip_val=null", "--trainer.strategy.activations=keep"),
            ],
            marks=SLOW,
        ),
    ],
)
@pytest.mark.seldom
def test_weights_are_chosen_anew_as_with_plain_lightning(arguments, capsys):
    on_plain = [argument for argument in arguments if "strategy" not in argument]
    streamed = fit("prune", *arguments, steps=3, folder="streamed")
    printed = r"[0-9.]+% are learned; they alone would be [0-9.]+ .iB up and [0-9.]+ .iB down per step"
    assert re.search(printed, capsys.readouterr().out)
    parity.compare(left(fit("prune", PLAIN, *on_plain, steps=3, folder="plain")), left(streamed))


def test_what_a_pruned_run_saves_are_the_weights_that_are_used(tiny_llm, monkeypatch):
    from safetensors.torch import load_file, save_file

    from examples.common.errors import BadInput
    from examples.prune.module import Prune
    from examples.prune.sparse import load

    kept = []
    monkeypatch.setattr(Prune, "on_fit_end", lambda self: kept.append(self.model), raising=False)
    run = fit("prune", f"--model.name_or_path={tiny_llm}", "--model.density=0.05")
    loaded = load(run / "model")
    with torch.no_grad():
        mine, theirs = (model.eval()(torch.arange(24)[None]).logits for model in (kept[0], loaded))
    assert torch.equal(mine, theirs)
    block = loaded.model.layers[0]
    assert block.mlp.up_proj.weight.count_nonzero() == round(0.05 * block.mlp.up_proj.weight.numel())
    weights = load_file(run / "model/sparse.safetensors")
    save_file({name: weight for name, weight in weights.items() if "norm" not in name}, "less.safetensors")
    shutil.copytree(run / "model", "less")
    pathlib.Path("less.safetensors").replace("less/sparse.safetensors")
    with pytest.raises(BadInput, match=r"less lacks the weights of LlamaForCausalLM: model.layers.0.input_layernorm.w"):
        load("less")
    dense = sum(path.stat().st_size for path in tiny_llm.glob("*.safetensors"))
    assert (run / "model/sparse.safetensors").stat().st_size < dense / 3  # the rest are embedding and head


@pytest.mark.parametrize(
    "options, said",
    [
        ({"density": 0.0}, r"model.density=0.0 and model.backward_density=None are shares"),
        (
            {"density": 0.3, "backward_density": 0.2},
            r"model.backward_density=0.2 are shares, .* not less than the first",
        ),
        ({"every": 0}, r"model.every=0 has to be 1 or more"),
        ({"ramp_steps": -1}, r"model.ramp_steps=-1 0 or more"),
    ],
)
def test_shares_that_are_none_are_named(options, said):
    from examples.common.errors import BadInput
    from examples.prune.module import Prune

    with pytest.raises(BadInput, match=said):
        Prune(**options).load()


# ---- experts out of a dense model


def split_feed_forward(experts=2, shared=0.25):
    from examples.moefy.experts import SplitFeedForward, Tokens

    dense = causal("Llama", hidden_size=8, intermediate_size=8).model.layers[0].mlp
    return dense, SplitFeedForward(dense, Tokens(), 96, experts, shared, seed=0)


def test_neurons_are_dealt_out_by_importance_and_their_sum_is_the_dense_layer():
    dense, layer = split_feed_forward()
    order = torch.tensor([5, 3, 0, 1, 2, 4, 6, 7])
    layer.fill(dense, order)
    dealt = [order[:2], order[2::2], order[3::2]]
    for part, neurons in zip([layer.shared, *layer.experts], dealt, strict=True):
        assert torch.equal(part.gate_proj.weight, dense.gate_proj.weight[neurons])
        assert torch.equal(part.up_proj.weight, dense.up_proj.weight[neurons])
        assert torch.equal(part.down_proj.weight, dense.down_proj.weight[:, neurons])
    tokens = torch.randn(3, 8)
    parts = layer.shared(tokens) + layer.experts[0](tokens) + layer.experts[1](tokens)
    torch.testing.assert_close(parts, dense(tokens))


def test_a_token_goes_to_the_shared_part_and_to_its_own_expert_and_no_other_is_called():
    _, layer = split_feed_forward()
    zero = (layer.table == 0).nonzero()[:2, 0]
    assert torch.bincount(layer.table.int()).tolist() == [48, 48]  # of 96 tokens
    called = []
    for index, expert in enumerate(layer.experts):
        expert.register_forward_hook(lambda *_, index=index: called.append(index))
    layer.tokens.ids, states = zero[None], torch.randn(1, 2, 8)
    torch.testing.assert_close(layer(states), layer.shared(states) + layer.experts[0](states))
    assert called == [0, 0]  # by the layer, and above
    ids = torch.tensor([[int((layer.table == 1).nonzero()[0]), int(zero[0])]])
    layer.tokens.ids = ids
    torch.testing.assert_close(layer(states)[0, 0], (layer.shared(states) + layer.experts[1](states))[0, 0])


def test_a_neurons_importance_is_what_the_loss_would_lose_to_first_order():
    from examples.moefy.experts import feed_forwards, watched

    model, batch, made = causal("Llama"), rows(), []
    hook = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: made.append(args[0]))
    loss = model(**batch).loss
    (gradient,) = torch.autograd.grad(loss, made[0])
    expected = (made[0] * gradient).sum(1).abs().sum(0)
    hook.remove()
    model.requires_grad_(False)
    with watched(model, torch.device("cpu")) as totals:
        for _ in range(2):
            model(**batch).loss.backward()
    assert len(totals) == len(feed_forwards(model)) == 2
    torch.testing.assert_close(totals[1], 2 * expected)
    assert not model.model.layers[1].mlp.down_proj._forward_pre_hooks


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            [
                *("--trainer.precision=bf16-mixed", "--trainer.accumulate_grad_batches=2"),
                *("--trainer.strategy.window=1", "--trainer.strategy.activations=recompute"),
            ],
            marks=SLOW,
        ),
        pytest.param(
            [
                *("--data.packing=false", "--trainer.gradient_clip_val=null"),
                *("--trainer.strategy.units=auto", "--trainer.strategy.activations=offload"),
            ],
            marks=SLOW,
        ),
    ],
)
def test_experts_are_made_and_taught_as_with_plain_lightning(arguments):
    on_plain = [argument for argument in arguments if "strategy" not in argument]
    streamed, plain = fit("moefy", *arguments, folder="streamed"), fit("moefy", PLAIN, *on_plain, folder="plain")
    parity.compare(left(plain), left(streamed))


@pytest.mark.seldom
def test_before_the_first_step_experts_have_the_dense_models_neurons_and_are_exported_with_them(monkeypatch):
    from transformers import AutoModelForCausalLM

    from examples.moefy.experts import load
    from examples.moefy.module import Moefy

    kept = []
    monkeypatch.setattr(Moefy, "on_fit_end", lambda self: kept.append(self.model), raising=False)
    run = fit("moefy", "--model.lr=0", steps=1)
    loaded, dense = load(run / "model"), AutoModelForCausalLM.from_pretrained(run / "tiny/teacher")
    with torch.no_grad():
        mine, theirs = (model.eval()(torch.arange(24)[None]).logits for model in (kept[0], loaded))
    assert torch.equal(mine, theirs)
    for block, original in zip(loaded.model.layers, dense.model.layers, strict=True):
        neurons = [part.up_proj.weight for part in (block.mlp.shared, *block.mlp.experts)]
        expected = original.mlp.up_proj.weight
        assert {tuple(row) for part in neurons for row in part.tolist()} == {tuple(row) for row in expected.tolist()}
        assert not torch.equal(neurons[0], expected[: len(neurons[0])])  # not those that happen to be first


@pytest.mark.seldom
def test_an_expert_without_tokens_sends_no_gradients_down():
    data = write("my.jsonl", *[{"text": "a" * 16}] * 8)
    arguments = f"--data.path={data}", "--data.packing=false", "--data.block_size=16", "--data.batch_size=4"
    run = fit("moefy", *arguments, "--trainer.callbacks+=test_recipes.Moved")
    checkpoint = torch.load(last(run), weights_only=True)
    stepped = checkpoint["optimizer_states"][0]["state"].values()
    trained = sum(w.nbytes for n, w in checkpoint["state_dict"].items() if not n.endswith(".table"))
    down = sum(state["exp_avg"].nbytes for state in stepped)
    assert Moved.stats["bytes_down"] == 2 * down and down < 0.8 * trained


def test_what_can_not_be_split_is_named():
    from examples.common.errors import BadInput
    from examples.moefy.experts import split

    with pytest.raises(BadInput, match="PhiForCausalLM has no feed-forward layers with gate_proj, up_proj, down_proj"):
        split(causal("Phi"), experts=2, shared=0.25)
    for experts, shared in ((1, 0.25), (2, 1.0), (64, 0.5)):
        with pytest.raises(BadInput, match=f"32 neurons cannot be split into {experts} experts and a share of"):
            split(causal("Llama"), experts=experts, shared=shared)


# ---- one block for all, then a block for each


def test_a_phase_is_said_apart_and_its_first_step_is_not_counted():
    from examples.common.summary import traffic

    batches = [("one", 9, 9), ("one", 9, 9), ("one", 1, 2), ("one", 3, 4), ("two", 1024, 0)]
    assert traffic(batches, 2) == "4 B up and 6 B down per step while one, 2.00 KiB up and 0 B down per step while two"
    assert traffic([("", 5, 6), ("", 1, 2)], 1) == "1 B up and 2 B down per step" and traffic([], 1) == ""


def delinking(step, *arguments, steps=4, folder):
    return fit("pseudo_to_real", f"--model.delink_at={step}", *arguments, steps=steps, folder=folder)


@pytest.mark.parametrize(
    "step, arguments",
    [
        (2, []),
        pytest.param(1, ["--trainer.gradient_clip_val=null", "--trainer.strategy.activations=keep"], marks=SLOW),
        pytest.param(
            3,
            ["--trainer.precision=bf16-mixed", "--trainer.accumulate_grad_batches=2", "--trainer.strategy.window=1"],
            marks=SLOW,
        ),
    ],
)
@pytest.mark.seldom
def test_a_run_that_delinks_its_blocks_is_plain_lightnings_and_goes_on_from_either_side(step, arguments):
    """It is resumed at the second step: before the switch, at it, and behind it."""
    on_plain = [argument for argument in arguments if "strategy" not in argument]
    through = delinking(step, PLAIN, "--trainer.callbacks+=test_recipes.Halfway", *on_plain, folder="through")
    parity.compare(left(through), left(delinking(step, *arguments, folder="streamed")))
    parity.compare(left(through), left(delinking(step, "--ckpt_path=half.ckpt", *arguments, folder="resumed")))


@pytest.mark.simgpu
@pytest.mark.parametrize(
    "recipe, arguments",
    [
        ("pseudo_to_real", ["--model.delink_at=1"]),
        ("distill", ["--model.match=both"]),
        ("distill", ["--data.packing=false", "--model.on_policy=1", "--model.max_new_tokens=4"]),
        ("prune", ["--model.every=1"]),
        ("moefy", []),
    ],
)
@SLOW
def test_a_recipe_is_plain_lightnings_beside_copies_that_are_under_way(recipe, arguments):
    importlib.import_module("simgpu.lightning")
    plain = ["--trainer.strategy=SingleDeviceStrategy", "--trainer.strategy.device=simgpu:0"]
    arguments = ["--trainer.accelerator=simgpu", "--trainer.gradient_clip_val=null", *arguments]
    streamed = fit(recipe, *arguments, steps=3, folder="streamed")
    parity.compare(left(fit(recipe, *arguments, *plain, steps=3, folder="plain")), left(streamed))


def test_blocks_are_delinked_with_their_weights_and_their_state():
    from types import SimpleNamespace

    from examples.common.schedule import adamw
    from examples.pseudo_to_real.module import PseudoToReal

    module = PseudoToReal(layers=3, hidden_size=16, heads=2)
    words = SimpleNamespace(pad_token_id=0, bos_token_id=1, eos_token_id=2, __len__=lambda: 32)
    words = type("Words", (), {**vars(words), "__len__": lambda self: 32})()
    optimizers = []
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(tokenizer=words, block_size=8), optimizers=optimizers)
    module.configure_model()
    optimizers.append(adamw(module, 0.1, 0.0))
    module.model(**rows(2, 8) | {"input_ids": torch.arange(16).view(2, 8), "labels": None}).logits.sum().backward()
    optimizers[0].step()
    expected = {name: weight.clone() for name, weight in module.state_dict().items()}
    count = len(list(module.parameters()))
    module.delink()
    assert len(list(module.parameters())) > 2 * count
    assert module.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in module.state_dict().items())
    made_anew = adamw(module, 0.1, 0.0).param_groups
    for mine, anew in zip(optimizers[0].param_groups, made_anew, strict=True):
        assert all(one is other for one, other in zip(mine["params"], anew["params"], strict=True))
    layers = module.model.model.layers
    for parameters in zip(*(layer.parameters() for layer in layers), strict=True):
        first, *others = (optimizers[0].state[parameter] for parameter in parameters)
        assert all(torch.equal(first["exp_avg"], other["exp_avg"]) and other["step"] == 1 for other in others)
        assert all(first["exp_avg"] is not other["exp_avg"] for other in others)
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2]


@pytest.mark.seldom
def test_while_blocks_are_one_its_weights_travel_once_and_a_plain_model_reads_the_checkpoint():
    from transformers import AutoModelForCausalLM

    moved = "--trainer.callbacks+=test_recipes.Moved"
    run = delinking(2, moved, steps=2, folder="shared")
    together = dict(Moved.stats)
    state = torch.load(last(run), weights_only=True)["state_dict"]
    unique = {weight.data_ptr(): weight.nbytes for weight in state.values()}
    assert together["bytes_down"] == 2 * sum(unique.values())
    exported = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()  # of a run that ends before the switch
    assert exported.keys() == {name.removeprefix("model.") for name in state}
    assert all(torch.equal(weight, state[f"model.{name}"]) for name, weight in exported.items())
    delinking(0, moved, steps=2, folder="apart")
    assert 3 * together["bytes_up"] < Moved.stats["bytes_up"] and 3 * together["bytes_down"] < Moved.stats["bytes_down"]


def test_a_step_at_which_nothing_can_be_delinked_is_named():
    from examples.common.errors import BadInput
    from examples.pseudo_to_real.module import PseudoToReal

    with pytest.raises(BadInput, match=r"model.delink_at=-1 is no step"):
        PseudoToReal(delink_at=-1).load()


# ---- batch inference


def predict(*arguments, folder="run", recipe="predict"):
    """Runs a recipe; gives the records that it wrote."""
    where = [f"--trainer.default_root_dir={folder}", *QUIET]
    main(["predict", "--config", f"examples/{recipe}/config.yaml", *where, *arguments])
    (written,) = pathlib.Path(folder).glob("*.jsonl")
    return [json.loads(line) for line in written.read_text().splitlines()]


def test_answers_are_those_of_the_plain_run(tiny_llm, capsys):
    data = write("ask.jsonl", {"prompt": "The owl"}, {"prompt": "The cat sees a red", "id": 7}, {"prompt": "A"})
    arguments = f"--model.name_or_path={tiny_llm}", f"--data.path={data}", "--data.batch_size=2"
    streamed = predict(*arguments, "--trainer.callbacks+=test_recipes.Moved", folder="streamed")
    assert Moved.stats["bytes_down"] == 0 and Moved.stats["fetches"] > 16
    assert re.search(r"\d+ tokens in [0-9.]+ s, [0-9.]+ tokens per second", capsys.readouterr().out)
    assert streamed == predict(*arguments, PLAIN, folder="plain") and streamed[1]["id"] == 7


@pytest.mark.seldom
def test_a_model_answers_with_the_adapters_that_were_trained_on_it(tiny_llm, words):
    from examples.common.errors import BadInput

    peft, transformers = (pytest.importorskip(name) for name in ("peft", "transformers"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_llm)
    trained = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)).eval()
    trained.save_pretrained("adapters")
    prompt = words("The owl", return_tensors="pt").input_ids
    plain = trained.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=words.pad_token_id)
    data = write("ask.jsonl", {"prompt": "The owl"})
    arguments = f"--model.name_or_path={tiny_llm}", f"--data.path={data}", "--model.max_new_tokens=8"
    (found,) = predict(*arguments, "--model.adapters=adapters")
    assert found["answer"] == words.decode(plain[0, prompt.shape[1] :], skip_special_tokens=True)
    assert [found] != predict(*arguments, folder="without")
    with pytest.raises(BadInput, match=r"adapters run has no adapter_config\.json, which a run of lora_llm writes"):
        predict(*arguments, "--model.adapters=run")


@pytest.mark.seldom
def test_the_longest_prompts_are_answered_first_and_all_written_in_their_order(tiny_llm, monkeypatch):
    """So rows of a batch have hardly any padding, and the first batch, by which memory is counted, is the largest."""
    from examples.predict.module import Generate

    shapes, step = [], Generate.predict_step
    monkeypatch.setattr(
        Generate,
        "predict_step",
        lambda self, batch, index: (shapes.append(batch["input_ids"].shape), step(self, batch, index))[1],
    )
    prompts = [{"prompt": "owl " * length, "id": number} for number, length in enumerate((2, 9, 3, 12, 2, 9, 1))]
    found = predict(
        f"--model.name_or_path={tiny_llm}", f"--data.path={write('ask.jsonl', *prompts)}", "--data.batch_size=2"
    )
    assert [{key: record[key] for key in ("prompt", "id")} for record in found] == prompts
    lengths = [length for _, length in shapes]
    assert lengths == sorted(lengths, reverse=True)
    assert [rows for rows, _ in shapes] == [2, 2, 2, 1]


@pytest.mark.simgpu
@pytest.mark.seldom
def test_answers_with_a_cache_on_the_host_are_the_same(tiny_llm):
    import simgpu.lightning  # noqa: F401

    arguments = f"--model.name_or_path={tiny_llm}", "--model.temperature=0.5", "--trainer.accelerator=simgpu"
    assert predict(*arguments, "--model.cache=host") == predict(*arguments, "--model.cache=device")


@pytest.mark.seldom
def test_a_shorter_prompt_is_answered_as_it_is_alone(tiny_llm):
    """It is padded on its left, beside a longer one."""
    prompts = [{"prompt": "The owl"}, {"prompt": "The cat sees a red boat and then another boat"}]
    arguments = f"--model.name_or_path={tiny_llm}", f"--data.path={write('ask.jsonl', *prompts)}"
    together, alone = predict(*arguments), predict(*arguments, "--data.batch_size=1")
    assert [answer["answer"] for answer in together] == [answer["answer"] for answer in alone]


@pytest.mark.seldom
def test_a_model_that_sees_padding_answers_one_prompt_at_a_time(words):
    from examples.common.errors import BadInput

    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.RwkvConfig(vocab_size=len(words), eos_token_id=words.eos_token_id, **sizes)
    model = transformers.RwkvForCausalLM(config).eval()
    model.save_pretrained("rwkv")
    words.save_pretrained("rwkv")
    prompts = [{"prompt": "The owl"}, {"prompt": "The cat sees a red boat"}]
    arguments = "--model.name_or_path=rwkv", f"--data.path={write('ask.jsonl', *prompts)}", "--model.max_new_tokens=4"
    with pytest.raises(BadInput, match="RwkvForCausalLM does not heed attention_mask"):
        predict(*arguments)
    for prompt, found in zip(prompts, predict(*arguments, "--data.batch_size=1"), strict=True):
        tokens = words(prompt["prompt"], return_tensors="pt").input_ids
        plain = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=words.pad_token_id)
        assert found["answer"] == words.decode(plain[0, tokens.shape[1] :], skip_special_tokens=True)


def test_a_prompt_beside_a_chat_has_the_tokens_that_it_has_alone(tiny_llm, words):
    """A template writes the token of the beginning itself; the tokenizer writes it before a text."""
    from types import SimpleNamespace

    from tokenizers.processors import TemplateProcessing

    from examples.predict.module import PromptData

    words.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    words.save_pretrained("begins")
    data = PromptData(write("ask.jsonl", chat("?"), {"prompt": "A"}), tokenizer="begins")
    module = SimpleNamespace(checkpoint=str(tiny_llm), max_new_tokens=1)
    data.trainer = SimpleNamespace(lightning_module=module)
    data.setup("predict")
    (batch,) = data.predict_dataloader()
    texts = words.batch_decode(batch["input_ids"])
    assert [text.replace("<pad>", "") for text in texts] == ["<|u|>?</s><|assistant|>", "<s>A"]


@pytest.mark.parametrize(
    "record, said",
    [
        ({"text": "The cat"}, r"ask.jsonl, line 2 has the keys \['text'\]; a record needs \"prompt\", or"),
        ({"prompt": ""}, "ask.jsonl, line 2: the prompt has no tokens to continue"),
        ({"messages": [{"role": "user"}]}, 'ask.jsonl, line 2: "messages" needs a list of'),
        (
            {"prompt": "The owl " * 99},
            r"line 2: a prompt of \d+ tokens and max_new_tokens=16 are more than the 256 posit",
        ),
    ],
)
@pytest.mark.few(1)
def test_a_prompt_that_is_none_is_named(record, said, tiny_llm):
    from examples.common.errors import BadInput

    data = write("ask.jsonl", {"prompt": "The owl"}, record)
    with pytest.raises(BadInput, match=said):
        predict(f"--model.name_or_path={tiny_llm}", f"--data.path={data}")
    assert not pathlib.Path("run/answers.jsonl").exists()


@pytest.mark.seldom
def test_a_run_that_fails_leaves_no_half_of_a_file_and_the_answers_before_it(tiny_llm, monkeypatch):
    from examples.predict.module import Generate

    def fail(*_):
        raise RuntimeError("out of luck")

    arguments = f"--model.name_or_path={tiny_llm}", f"--data.path={write('ask.jsonl', {'prompt': 'The owl'})}"
    before = predict(*arguments)
    monkeypatch.setattr(Generate, "predict_step", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        predict(*arguments)
    assert [json.loads(line) for line in pathlib.Path("run/answers.jsonl").read_text().splitlines()] == before
    assert [path.name for path in pathlib.Path("run").glob("answers*")] == ["answers.jsonl"]


def killed_after(batches, arguments):
    """Run the recipe in a process that is killed when so many batches are answered; it may end before."""
    code = f"""
        import os, signal
        import torch
        from examples.common.answers import Answers
        from sp_lightning.cli import main
        torch.set_num_threads(1)
        write, left = Answers.on_predict_batch_end, [{batches}]
        def counted(self, *arguments):
            write(self, *arguments)
            left[0] -= 1
            if not left[0]:
                self.out.write(b'{{"prompt": "half of a li')
                self.out.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        Answers.on_predict_batch_end = counted
        main({["predict", "--config", "examples/predict/config.yaml", *arguments]!r})
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=env, capture_output=True)


@SLOW
@pytest.mark.parametrize("count, batches", [(12, (1, 2)), (1000, (20, 60, 99))])
def test_a_run_that_is_killed_goes_on_to_the_same_file(count, batches, tiny_llm, capsys):
    words = ("The owl", "The cat sees a red boat", "A", "The cat")
    data = write("ask.jsonl", *({"prompt": words[number % 4], "id": number} for number in range(count)))
    where = [f"--model.name_or_path={tiny_llm}", f"--data.path={pathlib.Path(data).absolute()}"]
    where += ["--data.batch_size=2", "--model.temperature=0.7", "--model.max_new_tokens=4"]
    undisturbed = predict(*where)
    folder = pathlib.Path("killed").absolute()
    for number in batches:
        done = killed_after(number, [f"--trainer.default_root_dir={folder}", *QUIET, *where])
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert not (folder / "answers.jsonl").exists()
    capsys.readouterr()
    assert predict(*where, folder="killed") == undisturbed
    assert f"going on after {2 * sum(batches)} records" in capsys.readouterr().out
    assert [path.name for path in folder.glob("answers*")] == ["answers.jsonl"]


@SLOW
def test_answers_of_another_run_are_not_gone_on_from(tiny_llm):
    data = pathlib.Path(write("ask.jsonl", *({"prompt": "The owl", "id": number} for number in range(6)))).absolute()
    where = [f"--model.name_or_path={tiny_llm}", f"--data.path={data}", "--data.batch_size=2"]
    folder = pathlib.Path("killed").absolute()
    killed_after(1, [f"--trainer.default_root_dir={folder}", *QUIET, *where])
    other = "--model.max_new_tokens=3"
    assert predict(*where, other, folder="killed") == predict(*where, other)


@pytest.mark.parametrize("bits", ["nf4", *(pytest.param(bits, marks=SLOW) for bits in (4, 8, "int8"))])
@pytest.mark.seldom
def test_answers_of_a_packed_base_are_those_of_the_plain_run(bits, tiny_llm):
    pytest.importorskip(LIBRARY_OF[bits])
    arguments = f"--model.name_or_path={tiny_llm}", f"--model.base_bits={bits}", "--model.dtype=bfloat16"
    assert predict(*arguments, "--data.batch_size=4") == predict(
        *arguments, "--data.batch_size=4", PLAIN, folder="plain"
    )


# ---- what is said of many images and texts


@pytest.mark.parametrize("recipe", ["classify", "describe", "embed"])
@pytest.mark.few(1)
def test_predictions_are_those_of_the_plain_run(recipe):
    streamed = predict("--trainer.callbacks+=test_recipes.Moved", recipe=recipe, folder="streamed")
    assert Moved.stats["bytes_down"] == 0 and Moved.stats["fetches"] > 8
    assert streamed == predict(PLAIN, recipe=recipe, folder="plain")
    assert predict("--data.batch_size=1", recipe=recipe) != []
    if recipe != "embed":
        assert [record["image"] for record in streamed] == sorted(record["image"] for record in streamed)


@SLOW
@pytest.mark.parametrize("recipe", ["describe", "embed"])
def test_predictions_with_a_packed_base_are_those_of_the_plain_run(recipe):
    pytest.importorskip("torchao")
    arguments = "--model.base_bits=nf4", "--model.dtype=bfloat16"
    assert predict(*arguments, recipe=recipe) == predict(*arguments, PLAIN, recipe=recipe, folder="plain")


@pytest.mark.parametrize("recipe", ["classify", "describe"])
@pytest.mark.seldom
def test_an_image_that_cannot_be_read_is_told_and_the_others_go_on(recipe):
    from examples.common import tiny

    folder = pathlib.Path("photos")
    tiny.image_folder(folder, 2)
    one_by_one = f"--data.path={folder}", "--data.batch_size=1", "--model.dtype=float32"
    before = predict(*one_by_one, recipe=recipe)
    (folder / "broken.jpg").write_bytes(b"no image")
    (folder / "notes.txt").write_text("not looked at")
    after = predict(*one_by_one, recipe=recipe)
    (broken,) = [record for record in after if "error" in record]
    assert broken["image"] == "broken.jpg" and "photos/broken.jpg is not an image that can be read" in broken["error"]
    assert [record for record in after if record is not broken] == before
    together = predict(f"--data.path={folder}", "--data.batch_size=3", "--model.dtype=float32", recipe=recipe)
    assert [record["image"] for record in together] == [record["image"] for record in after]
    assert [broken] == [record for record in together if "error" in record]


@pytest.mark.parametrize(
    "recipe, arguments, said",
    [
        ("classify", ["--data.path=none"], "the image folder none does not exist"),
        ("classify", ["--data.path=."], r"\. has no images: files that end in .bmp, "),
        ("describe", ["--data.path=ask.jsonl"], "ask.jsonl is a file, not a folder of images"),
        ("embed", ["--data.path=ask.jsonl"], r"ask.jsonl, line 1 has the keys \['prompt'\]; a record needs \"text\""),
        ("embed", ["--data.path=long.jsonl"], r"long.jsonl, line 2: a text of \d+ tokens; the model of \S+ takes 1 to"),
    ],
)
@pytest.mark.few(1)
def test_images_and_texts_that_are_none_are_named(recipe, arguments, said):
    from examples.common.errors import BadInput

    write("ask.jsonl", {"prompt": "The owl"})
    write("long.jsonl", {"text": "The owl"}, {"text": "The owl " * 999})
    with pytest.raises(BadInput, match=said):
        predict(*arguments, recipe=recipe)


def test_a_long_text_may_be_cut():
    write("long.jsonl", {"text": "The owl " * 999}, {"text": "The owl The owl The"}, {"text": "owl"})
    cut = predict("--data.path=long.jsonl", "--data.most_tokens=4", "--data.batch_size=1", recipe="embed")
    assert len({tuple(record["embedding"]) for record in cut[:2]}) == 1 and cut[2]["embedding"] != cut[0]["embedding"]


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.seldom
def test_a_vector_is_made_of_the_tokens_and_not_of_the_padding(pooling):
    """Beside a longer text it is what it is alone, but for how sums of other shapes are rounded."""
    write("texts.jsonl", {"text": "A cat sees a red boat and then another boat"}, {"text": "The owl"})
    arguments = "--data.path=texts.jsonl", f"--model.pooling={pooling}"
    together, alone = predict(*arguments, recipe="embed"), predict(*arguments, "--data.batch_size=1", recipe="embed")
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(torch.tensor(ours["embedding"]), torch.tensor(theirs["embedding"]))
        assert torch.tensor(ours["embedding"]).norm() == pytest.approx(1)
    assert together[0]["embedding"] != together[1]["embedding"]


def test_vectors_of_an_encoder_whose_tokenizer_ends_nothing(words):
    """As BERT's, which has no end-of-sequence token."""
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=len(words), **sizes)).eval()
    model.save_pretrained("bert")
    PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer, pad_token="<pad>").save_pretrained("bert")
    write("texts.jsonl", {"text": "The owl"})
    (found,) = predict("--data.path=texts.jsonl", "--model.name_or_path=bert", "--model.pooling=first", recipe="embed")
    with torch.no_grad():
        state = model(torch.tensor([words("The owl")["input_ids"]])).last_hidden_state[:, 0]
    assert found["embedding"] == torch.nn.functional.normalize(state, dim=-1)[0].tolist()


def test_a_text_that_is_cut_ends_as_texts_do(words):
    from tokenizers.processors import TemplateProcessing
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer, pad_token="<pad>", eos_token="</s>")
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A </s>", special_tokens=[("</s>", end)])
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = LlamaModel(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    for one in (tokenizer, model):
        one.save_pretrained("llama")
    write("long.jsonl", {"text": "The owl " * 99})
    (found,) = predict(
        *("--data.path=long.jsonl", "--model.name_or_path=llama", "--data.most_tokens=4", "--model.pooling=last"),
        recipe="embed",
    )
    tokens = tokenizer("The owl " * 99, truncation=True, max_length=4)["input_ids"]
    assert tokens[-1] == end and len(tokens) == 4
    with torch.no_grad():
        state = model(torch.tensor([tokens])).last_hidden_state[:, -1]
    assert found["embedding"] == torch.nn.functional.normalize(state, dim=-1)[0].tolist()


def test_a_chat_template_that_begins_a_text_begins_it_once():
    from transformers import AutoProcessor

    from examples.common import images, tiny

    tiny.vision_language_model(pathlib.Path("vlm"))
    processor = AutoProcessor.from_pretrained("vlm")
    begins = processor.tokenizer.bos_token
    assert images.special_tokens(processor, f"{begins}What?") == {"add_special_tokens": False}
    assert images.special_tokens(processor, "What?") == {}


@pytest.mark.seldom
def test_images_are_seen_as_they_were_held_and_names_may_be_any(tmp_path):
    from PIL import Image

    from examples.common import tiny
    from examples.common.errors import BadInput
    from examples.common.files import read_image

    tiny.image_classifier(pathlib.Path("vit"))
    photos = pathlib.Path("photos")
    photos.mkdir()
    picture = Image.linear_gradient("L").resize((32, 48)).convert("RGB")
    rotated = Image.Exif()
    rotated[0x0112] = 6
    picture.save("upright.png")
    picture.transpose(Image.Transpose.ROTATE_90).save("held.png", exif=rotated)
    assert read_image("held.png").tobytes() == read_image("upright.png").tobytes()
    Image.new("I;16", (4, 4)).save("deep.png")
    with pytest.raises(BadInput, match="more than 8 bits a channel"):
        read_image("deep.png")
    picture.save(os.fsdecode(b"photos/caf\xe9.png"))
    (photos / "gone.png").symlink_to("nowhere.png")
    (photos / "folder.png").mkdir()
    found = predict("--model.name_or_path=vit", "--data.path=photos", recipe="classify")
    assert [("label" in one, "error" in one) for one in found] == [(True, False), (False, True)]
    pathlib.Path("vit/preprocessor_config.json").write_text("{")
    with pytest.raises(BadInput, match="can not be read"):
        predict("--model.name_or_path=vit", "--data.path=photos", recipe="classify")


class Ends(L.Callback):
    def on_predict_batch_end(self, trainer, *_):
        if trainer.predict_loop.batch_progress.current.ready >= 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "more, goes_on", [([], True), (["--trainer.precision=bf16-mixed"], False), (["--data.batch_size=3"], False)]
)
@pytest.mark.seldom
def test_a_run_within_a_limit_goes_on_to_its_end_and_another_begins_anew(more, goes_on, capsys):
    given = "--trainer.limit_predict_batches=3", "--data.batch_size=4"
    undisturbed = predict(*given, *more, recipe="embed", folder="undisturbed")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        predict(*given, "--trainer.callbacks+=test_recipes.Ends", recipe="embed", folder="killed")
    capsys.readouterr()
    assert predict(*given, *more, recipe="embed", folder="killed") == undisturbed
    assert ("going on after" in "".join(capsys.readouterr())) is goes_on


@pytest.mark.seldom
def test_a_run_of_a_checkpoint_that_was_written_anew_begins_anew(capsys):
    from examples.common import tiny

    def write_model(seed):
        torch.manual_seed(seed)
        tiny.language_model(pathlib.Path("llm"))

    given = "--model.name_or_path=llm", "--data.batch_size=4"
    write_model(0)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        predict(*given, "--trainer.callbacks+=test_recipes.Ends", recipe="embed", folder="killed")
    write_model(1)
    undisturbed = predict(*given, recipe="embed", folder="undisturbed")
    capsys.readouterr()
    assert predict(*given, recipe="embed", folder="killed") == undisturbed
    assert "going on after" not in "".join(capsys.readouterr())


@SLOW
def test_a_classifier_that_was_trained_names_its_classes():
    run = fit("finetune_vision", "--trainer.max_epochs=6", folder="trained")
    found = predict(
        f"--model.name_or_path={run / 'model'}", f"--data.path={run / 'tiny/squares-val'}", recipe="classify"
    )
    right = [record["image"].split("/")[0] == record["label"] for record in found]
    assert {record["label"] for record in found} <= {"blue", "green", "red", "yellow"} and sum(right) > len(right) / 2


@pytest.mark.seldom
def test_a_classifier_sees_images_as_its_own_processor_prepares_them():
    from transformers import ViTImageProcessor

    from examples.classify.module import Classify
    from examples.common import tiny

    tiny.image_classifier(pathlib.Path("vit"))
    tiny.image_folder(pathlib.Path("photos"), 1)
    seen, step = [], Classify.predict_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Classify,
            "predict_step",
            lambda self, batch, index: (seen.append(batch["pixel_values"]), step(self, batch, index))[1],
        )
        arguments = "--model.name_or_path=vit", "--data.path=photos"
        predict(*arguments, recipe="classify")
        processor = ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1] * 3, image_std=[0.7] * 3)
        processor.save_pretrained("vit")
        predict(*arguments, recipe="classify")
    from PIL import Image

    names = sorted(pathlib.Path("photos").rglob("*.png"))
    expected = processor(images=[Image.open(name).convert("RGB") for name in names], return_tensors="pt")
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[1], expected["pixel_values"])


# ---- images


@SLOW
def test_a_batchnorm_model_of_torchvision_is_trained_as_by_plain_lightning():
    arguments = "--model.name_or_path=torchvision/shufflenet_v2_x0_5", "--model.pretrained=false", "--data.batch_size=4"
    streamed = fit("finetune_vision", *arguments, folder="streamed")
    parity.compare(left(fit("finetune_vision", *arguments, PLAIN, folder="plain")), left(streamed))
    assert torch.load(streamed / "model/model.pt", weights_only=True)["fc.weight"].shape[0] == 4


def test_an_exported_classifier_gives_the_averaged_models_logits():
    pytest.importorskip("torchvision")
    from transformers import AutoModelForImageClassification

    run = fit("finetune_vision")
    averaged = torch.load(last(run), weights_only=True)["state_dict"]
    loaded = AutoModelForImageClassification.from_pretrained(run / "model")
    assert loaded.config.id2label == {0: "blue", 1: "green", 2: "red", 3: "yellow"}
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, averaged[f"model.{name}"]), name


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda path: None, "the image folder images does not exist"),
        (lambda path: path.mkdir(), "images is not a folder of classes, each a folder of images"),
        (lambda path: broken_image(path / "red"), r"images/(red|blue)/0.png is not an image that can be read"),
        (
            lambda path: huge_image(path / "red"),
            r"images/(red|blue)/0.png is not an image that can be read: .* exceeds",
        ),
    ],
)
@pytest.mark.few(1)
def test_images_that_can_not_be_read_are_named(make, said):
    from examples.common.errors import BadInput

    make(pathlib.Path("images"))
    with pytest.raises(BadInput, match=said):
        fit("finetune_vision", "--data.path=images", "--data.batch_size=1")


def broken_image(folder):
    for place in (folder, folder.with_name("blue")):
        place.mkdir(parents=True)
        (place / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")


def huge_image(folder):
    """One that says so: a bomb that would fill the memory."""
    broken_image(folder)
    pixels = (100_000).to_bytes(4, "big")
    header = b"IHDR" + pixels + pixels + bytes([8, 2, 0, 0, 0])
    chunks = (
        len(part[4:]).to_bytes(4, "big") + part + zlib.crc32(part).to_bytes(4, "big") for part in (header, b"IDAT")
    )
    png = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    for place in (folder, folder.with_name("blue")):
        (place / "0.png").write_bytes(png)


def test_images_that_do_not_fill_a_batch_are_refused():
    pytest.importorskip("torchvision")
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=r"96 records do not fill one batch of data.batch_size=128"):
        fit("finetune_vision", "--data.batch_size=128")


def test_a_folder_of_splits_is_not_taken_for_one_of_classes(tmp_path):
    from examples.common.errors import BadInput

    for split in ("train", "val"):
        broken_image(tmp_path / "images" / split / "red")
    with pytest.raises(BadInput, match=r"images has train and val for its classes; --data.path names"):
        fit("finetune_vision", f"--data.path={tmp_path / 'images'}", "--data.batch_size=1")


def test_weights_that_can_not_be_downloaded_are_an_error_that_says_what_else(monkeypatch):
    from examples.common.errors import BadInput

    def refused(*_, **__):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refused)
    with pytest.raises(BadInput, match=r"resnet18 can not be downloaded .*no route.*--model.pretrained=false"):
        fit("finetune_vision", "--model.name_or_path=torchvision/resnet18")


def test_a_model_that_torchvision_does_not_have_is_refused():
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=r"torchvision has no classifier 'resnet19'; did you mean resnet1"):
        fit("finetune_vision", "--model.name_or_path=torchvision/resnet19")


# ---- images and text


CONNECTION = "--model.train=connection"


@pytest.mark.seldom
def test_of_a_frozen_vision_language_model_the_connection_and_a_token_are_trained():
    pytest.importorskip("torchvision")
    streamed = fit("finetune_vlm", CONNECTION, "--trainer.callbacks+=test_recipes.Moved", folder="streamed")
    trained = torch.load(last(streamed), weights_only=True)["state_dict"]
    parts = {f"model.model.multi_modal_projector.linear_{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}
    assert trained.keys() == parts | {"token"}
    assert Moved.stats["bytes_down"] == 2 * sum(tensor.nbytes for tensor in trained.values())
    parity.compare(left(fit("finetune_vlm", CONNECTION, PLAIN, folder="plain")), left(streamed))


def test_the_token_in_front_moves_what_tells_images_and_texts_apart_too(monkeypatch):
    from types import SimpleNamespace

    from examples.common.text import IGNORED
    from examples.finetune_vlm.module import FineTuneVLM

    module, seen = FineTuneVLM(train="connection", loss="full"), {}
    module.model = lambda **batch: seen.update(batch) or SimpleNamespace(loss=None)
    monkeypatch.setattr(FineTuneVLM, "trainer", SimpleNamespace(datamodule=SimpleNamespace(filler=9)))
    texts = ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
    module.loss({**{name: torch.tensor([[5, 6]]) for name in texts}, "image_grid_thw": torch.tensor([[1, 4, 4]])})
    first = {"input_ids": 9, "attention_mask": 1, "labels": IGNORED, "mm_token_type_ids": 0}
    assert {name: seen[name].tolist() for name in texts} == {name: [[first[name], 5, 6]] for name in texts}
    assert seen["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_of_a_record_with_an_image_the_completion_is_learned(tmp_path):
    pytest.importorskip("torchvision")
    from transformers import AutoProcessor

    from examples.common import tiny
    from examples.finetune_vlm.module import CaptionData

    data, made = CaptionData(), tmp_path / "captions"
    tiny.made(tmp_path / "vlm", tiny.vision_language_model)
    tiny.made(made, lambda part: tiny.captions(part, 1))
    data.processor = AutoProcessor.from_pretrained(tmp_path / "vlm")
    batch = data.collate(data.records(str(made / "captions.jsonl"))[:2])
    learned = [[token for token in row.tolist() if token != -100] for row in batch["labels"]]
    assert data.processor.tokenizer.batch_decode(learned) == [" It is red.</s>", " It is green.</s>"]


@pytest.mark.parametrize(
    "record, said",
    [
        ({"image": "no.png", "prompt": "?", "completion": "!"}, r"my.jsonl, line 1: the image no.png does not exist"),
        ({"image": "0.png", "prompt": "?"}, r"line 1 has the keys \['image', 'prompt'\]; a record needs"),
        ({"image": "red/0.png", "prompt": "?", "completion": "!"}, "red/0.png is not an image that can be read"),
    ],
)
@pytest.mark.few(1)
def test_a_record_whose_image_can_not_be_used_is_named(record, said):
    pytest.importorskip("torchvision")
    from examples.common.errors import BadInput

    broken_image(pathlib.Path("red"))
    with pytest.raises(BadInput, match=said):
        fit("finetune_vlm", f"--data.path={write('my.jsonl', record)}")


# ---- from nothing


def test_a_text_file_becomes_a_tokenizer_a_model_and_a_curve():
    pytest.importorskip("matplotlib")
    pathlib.Path("corpus.txt").write_text("\n\n".join(f"The owl sees {i} stones." for i in range(99)))
    run = fit("pretrain_small", "--data.path=corpus.txt", "--data.vocabulary=300", "--model.layers=2")
    assert logits(run / "model").shape == (1, 24, 300)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_tokenizer_is_made_anew_for_other_texts_or_another_size(tmp_path):
    from types import SimpleNamespace

    from examples.pretrain_small.module import PretrainData

    def made(text, vocabulary):
        data = PretrainData(vocabulary)
        data.trainer = SimpleNamespace(default_root_dir=tmp_path)
        return data.trained_tokenizer(write("my.jsonl", {"text": text}))

    first = made("one two", 300)
    assert made("one two", 300) == first and len({first, made("one two", 290), made("three", 300)}) == 3


def test_the_learning_rate_follows_the_budget_that_is_spent_first(monkeypatch):
    from lightning.pytorch.callbacks import Timer

    from examples.pretrain_small.module import PretrainLLM

    timer, module = Timer(duration={"seconds": 10}), PretrainLLM()
    module.trainer = L.Trainer(max_steps=100, callbacks=[timer], logger=False, accelerator="cpu")
    monkeypatch.setattr(timer, "time_elapsed", lambda: 5.0)
    assert module.spent(20) == 0.5 and module.spent(80) == 0.8 and module.spent(200) == 1.0


# ---- experts


@pytest.fixture(scope="session")
def tiny_mixture(tmp_path_factory, tiny_llm):
    from examples.common import tiny

    return tiny.made(tmp_path_factory.mktemp("tiny") / "mixture", tiny.mixture)


def mixture(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()


def test_experts_that_are_modules_compute_what_fused_ones_do(tiny_mixture):
    from examples.moe.experts import fused_state, separate

    model, tokens = mixture(tiny_mixture), torch.arange(48)[None]
    before, expected = model.state_dict(), model(tokens).logits
    assert separate(model) == 4
    assert torch.equal(model(tokens).logits, expected)
    state = fused_state(model)
    assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in state)


def test_experts_with_biases_and_another_layout_compute_what_fused_ones_do():
    from transformers import GptOssConfig, GptOssForCausalLM

    from examples.moe.experts import fused_state, separate

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = GptOssConfig(vocab_size=64, num_hidden_layers=2, head_dim=16, num_local_experts=4, **sizes)
    model = GptOssForCausalLM._from_config(config, experts_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_()
    tokens, before = torch.arange(48)[None], model.state_dict()
    expected = model(tokens).logits
    assert separate(model) == 2 and torch.equal(model(tokens).logits, expected)
    state = fused_state(model)
    assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in state)


def test_experts_that_compute_something_else_than_is_written_about_them_are_refused(tiny_mixture, monkeypatch):
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from examples.common.errors import BadInput
    from examples.moe.experts import separate

    monkeypatch.setattr(MixtralExperts, "_apply_gate", lambda self, gate_up: gate_up.chunk(2, dim=-1)[0])
    with pytest.raises(BadInput, match="MixtralExperts computes something else than its description says"):
        separate(mixture(tiny_mixture))


def test_recipes_that_share_a_folder_make_their_own_tiny_models(monkeypatch, tmp_path):
    from types import SimpleNamespace

    from examples.finetune_llm.module import FineTuneLLM
    from examples.moe.module import FineTuneMoE

    monkeypatch.setattr(FineTuneLLM, "trainer", SimpleNamespace(default_root_dir=tmp_path))
    assert FineTuneLLM().checkpoint != FineTuneMoE().checkpoint


def test_only_experts_that_were_routed_to_travel(tiny_mixture):
    from examples.moe.experts import Expert, separate

    model = mixture(tiny_mixture)
    separate(model)
    routed = []
    for name, module in model.named_modules():
        if isinstance(module, Expert):
            module.register_forward_hook(lambda *_, name=name: routed.append(name))
    with sp_lightning.stream(model, "cpu", window=1, units=["Expert"]) as handle, torch.no_grad():
        before = handle.stats()["bytes_up"]  # the rest of the model has been up since streaming began, or goes up now
        for token in range(8):
            model(torch.tensor([[token]]))
        moved = handle.stats()["bytes_up"] - before
        nbytes = {unit.name: unit.nbytes for unit in handle.units}
    assert len(routed) == 8 * 4 * 2 and len(set(routed)) < 4 * 8
    assert moved <= sum(nbytes[name] for name in routed) + nbytes["(root)"]


@pytest.mark.seldom
def test_a_mixture_is_exported_as_transformers_keeps_it(tiny_mixture):
    run = fit("moe", f"--model.name_or_path={tiny_mixture}")
    loaded, trained = mixture(run / "model"), torch.load(last(run), weights_only=True)["state_dict"]
    layer = loaded.model.layers[1].mlp.experts
    expert = "model.model.layers.1.mlp.experts.experts.3"
    assert torch.equal(layer.down_proj[3], trained[f"{expert}.down_proj"])
    assert torch.equal(layer.gate_up_proj[3], trained[f"{expert}.gate_up_proj"])


@pytest.mark.seldom
def test_a_model_without_experts_is_refused(tiny_llm):
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match="LlamaForCausalLM has no layer whose experts are a few tensors in a way"):
        fit("moe", f"--model.name_or_path={tiny_llm}")


# ---- sets of adapters side by side


def sweep(*names, folder, steps=2, given=()):
    """Runs some sets; gives the weights that each left."""
    safetensors = pytest.importorskip("safetensors.torch")
    sets = {
        "a": "{lr: 1.0e-2}",
        "b": "{lr: 3.0e-3, rank: 4, targets: [q_proj, down_proj], seed: 1}",
        "c": "{lr: 1.0e-2, rank: 2, alpha: 4.0}",
        "wild": "{lr: 1.0e+30}",
    }
    chosen = f"--model.sets={{{', '.join(f'{name}: {sets[name]}' for name in names)}}}"
    run = fit("sweep", chosen, *given, steps=steps, folder=folder)
    return {name: safetensors.load_file(run / f"adapters/{name}/adapter_model.safetensors") for name in names}


@SLOW
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_set_is_what_it_is_alone_whichever_others_run(precision):
    """To the last bit on the CPU; and one whose weights are not finite any more disturbs no other."""
    given = [f"--trainer.precision={precision}", "--trainer.accumulate_grad_batches=1"]
    together = sweep("a", "wild", "b", folder="together", given=given, steps=3)
    for name in ("a", "b"):
        alone = sweep(name, folder=name, given=given, steps=3)[name]
        assert alone.keys() == together[name].keys()
        assert all(torch.equal(alone[key], together[name][key]) for key in alone), name
    assert any(not weight.isfinite().all() for weight in together["wild"].values())


@pytest.mark.seldom
def test_a_set_is_trained_as_by_a_plain_loop_with_peft(tiny_llm, words):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from examples.common import tiny
    from examples.common.text import collate, encode, pack

    records = tiny.chats(40, seed=3)
    data, base = write("my.jsonl", *records), f"--model.name_or_path={tiny_llm}"
    given = [f"--data.path={data}", base, "--model.warmup_steps=0", "--trainer.accumulate_grad_batches=1"]
    found = sweep("a", "b", folder="run", given=given, steps=1)["b"]
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(tiny_llm)
    torch.manual_seed(1)
    model = get_peft_model(base, config)
    rows = pack([encode(record, words, "here") for record in records], 128, words.pad_token_id)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:4]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.01)
    model(**collate([rows[index] for index in order]), use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(found) == len(expected)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name.replace(".weight", ".default.weight")].data, msg=name)


@pytest.mark.seldom
def test_the_base_goes_up_once_for_all_sets():
    moved = ["--trainer.callbacks+=test_recipes.Moved"]
    ups = []
    for names in (["a"], ["a", "b", "c"]):
        found = sweep(*names, folder="_".join(names), given=moved)
        adapters = sum(weight.nbytes for weights in found.values() for weight in weights.values())
        ups.append((Moved.stats["bytes_up"], adapters))
        assert Moved.stats["bytes_down"] == 4 * adapters  # in 2 steps of 2 batches
    (one, few), (three, more) = ups
    assert one < three <= one + 14 * (more - few)  # each of 14 passes: 6 of the model tried, 4 forward, 4 backward


@pytest.mark.seldom
def test_sets_are_compared_in_a_table_and_a_picture(capsys):
    pytest.importorskip("matplotlib")
    sweep("a", "b", folder="run")
    printed = capsys.readouterr().out.splitlines()
    (header,) = (index for index, row in enumerate(printed) if row.split()[:3] == ["set", "loss", "lr"])
    assert {row.split()[0] for row in printed[header + 1 : header + 3]} == {"a", "b"}
    assert pathlib.Path("run/losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argument, said",
    [
        ("--model.sets={}", "model.sets has no set"),
        ("--model.sets={a/b: {}}", "'a/b' names a folder: letters, digits and _, but not default"),
        ("--model.sets={a: {}, b: {targets: [none]}}", "model.sets, set b: targets names 'none'.* layers are down"),
        ("--model.sets={a: {rank: 0}}", "model.sets, set a: .*0"),
        ("--model.sets={a: {targets: [embed_tokens]}}", "model.embed_tokens has an adapter, but is in none of"),
    ],
)
@pytest.mark.seldom
def test_sets_that_can_not_run_are_named(argument, said):
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=said):
        fit("sweep", argument)


def test_one_factor_for_the_losses_of_all_sets_is_refused(monkeypatch):
    from types import SimpleNamespace

    from examples.common.errors import BadInput
    from examples.sweep.module import Sweep

    monkeypatch.setattr(Sweep, "trainer", SimpleNamespace(precision="16-mixed"))
    with pytest.raises(BadInput, match="16-mixed scales the losses of all sets by one factor: use bf16-mixed"):
        Sweep({}).configure_optimizers()


def beside(model):
    """A model with two sets of adapters and the base beside them."""
    peft = pytest.importorskip("peft")
    from examples.common.side_by_side import SideBySide

    model = peft.get_peft_model(model.eval(), peft.LoraConfig(target_modules="all-linear"), "a")
    model.add_adapter("b", peft.LoraConfig(target_modules="all-linear", r=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model, SideBySide(model, ["a", "b", None])


@pytest.mark.parametrize("kind, config", [("Llama", {}), ("GPTNeoX", {}), ("Qwen3", {"head_dim": 8}), ("Phi", {})])
@pytest.mark.few(3)
def test_side_by_side_each_set_has_the_hidden_states_that_it_has_alone(kind, config):
    from examples.common.loss import hidden_states

    model, side_by_side = beside(causal(kind, **config))
    parts = side_by_side(rows())
    for name, part in zip(["a", "b", None], parts, strict=True):
        with side_by_side.alone(), contextlib.nullcontext() if name else model.disable_adapter():
            if name:
                model.set_adapter(name)
            assert torch.equal(part, hidden_states(model, rows())), name


def test_a_model_whose_sets_would_not_be_what_they_are_alone_is_refused():
    from examples.common.errors import BadInput

    said = "Gemma2ForCausalLM does more to its logits .*, so sets of adapters cannot share its passes"
    with pytest.raises(BadInput, match=said):
        beside(causal("Gemma2", head_dim=8))[1](rows())
    model = causal("Llama")
    norm = model.model.norm.forward
    model.model.norm.forward = lambda hidden: norm(hidden + hidden[:1])  # which one row sees of another
    with pytest.raises(BadInput, match=r"LlamaForCausalLM does more with its hidden states than .* \(they differ by"):
        beside(model)[1](rows())


# ---- preferences


@SLOW
@pytest.mark.parametrize("arguments", [[], *VARIED], ids=lambda given: "".join(given)[:24])
def test_all_weights_learn_beside_their_reference_as_with_plain_lightning(arguments):
    moved = "--trainer.callbacks+=test_recipes.Moved"
    streamed = fit("preference", "--model.train=all", *arguments, moved, folder="streamed")
    saved = torch.load(last(streamed), weights_only=True)["state_dict"]
    assert not any(name.startswith("reference") for name in saved)
    batches = 6 if "--trainer.accumulate_grad_batches=3" in arguments else 4
    if "--trainer.precision=bf16-mixed" not in arguments:
        assert Moved.stats["bytes_down"] == batches * sum(tensor.nbytes for tensor in saved.values())
    shared = [argument for argument in arguments if "strategy" not in argument]
    plain = fit("preference", "--model.train=all", PLAIN, *shared, folder="plain")
    parity.compare(left(plain), left(streamed))


@SLOW
def test_all_weights_go_on_beside_the_reference_that_they_began_with():
    halfway = "--trainer.callbacks+=test_recipes.Halfway"
    through = fit("preference", PLAIN, halfway, "--model.train=all", steps=4, folder="through")
    resumed = fit("preference", "--ckpt_path=half.ckpt", "--model.train=all", steps=4, folder="resumed")
    parity.compare(left(through), left(resumed))


@pytest.fixture
def pairs(words):
    """A batch of two pairs of answers."""
    from examples.preference.module import PairData, sums

    data = PairData(write("pairs.jsonl", *sums(2)), batch_size=2, block_size=32)
    data.tokenizer, data.embedded = words, len(words)
    return data.collate(data.rows(data.path))


def test_the_loss_is_that_of_a_plain_model_with_its_adapters_on_and_off(pairs, tiny_llm):

    from torch.nn.functional import log_softmax, logsigmoid

    from examples.preference.module import Preference

    def answers(logits):
        labels = pairs["labels"][:, 1:]
        found = log_softmax(logits[:, :-1], -1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        return (found * (labels != -100)).sum(1)

    module = Preference(name_or_path=str(tiny_llm), beta=0.5)
    module.log = lambda *_, **__: None
    module.configure_model()
    assert torch.equal(module.loss(pairs), torch.tensor(2.0).log())  # before it learned anything
    for name, parameter in module.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    given = {"input_ids": pairs["input_ids"], "attention_mask": pairs["attention_mask"]}
    with module.side_by_side.alone():
        module.model.set_adapter("default")
        policy = answers(module.model(**given).logits)
        with module.model.disable_adapter(), torch.no_grad():
            reference = answers(module.model(**given).logits)
    chosen, rejected = (policy - reference).chunk(2)
    expected = -logsigmoid(0.5 * (chosen - rejected)).mean()
    module.model.set_adapter("default")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    loss = module.loss(pairs)
    torch.testing.assert_close(loss, expected)
    for mine, plain in zip(*(torch.autograd.grad(each, trained) for each in (loss, expected)), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


@CHUNKED
@pytest.mark.parametrize("train", ["adapters", "all"])
@pytest.mark.few(1)
def test_in_chunks_the_loss_of_pairs_is_the_same(train, pairs, tiny_llm):
    from examples.preference.module import Preference

    losses = []
    for kind in ("full", "chunked"):
        module = Preference(name_or_path=str(tiny_llm), train=train, loss=kind)
        module.log = lambda *_, **__: None
        torch.manual_seed(0)
        module.configure_model()
        for name, parameter in module.model.named_parameters():
            if "lora_B" in name or train == "all":
                parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
        losses.append(module.loss(pairs))
        assert module.next_tokens.chunked is (kind == "chunked")
    torch.testing.assert_close(*losses)
    assert losses[0] != torch.tensor(2.0).log()


@pytest.mark.seldom
def test_a_reference_that_shares_the_base_moves_nothing(tiny_llm):
    base, moved = f"--model.name_or_path={tiny_llm}", "--trainer.callbacks+=test_recipes.Moved"
    one = "--model.sets={a: {lr: 0.01}}"
    fit("sweep", base, moved, one, "--data.packing=false", folder="one")
    alone = Moved.stats["bytes_up"]
    fit("preference", base, moved, folder="pairs")
    assert Moved.stats["bytes_up"] == alone


@pytest.mark.parametrize(
    "record, said",
    [
        (
            {"prompt": "?", "chosen": "a"},
            r"line 1 has the keys \['chosen', 'prompt'\]; a record needs \"prompt\", \"chosen",
        ),
        ({"chosen": "a", "rejected": "b"}, r"line 1 has the keys \['chosen', 'rejected'\]; a record needs"),
        (
            {"chosen": [{"role": "user", "content": "?"}], "rejected": []},
            "is a chat in which the assistant says nothing",
        ),
        ({"chosen": [{"role": "assistant", "content": "!"}], "rejected": []}, r"has the keys \['chosen', 'rejected'\]"),
        ({"prompt": "The owl " * 99, "chosen": "a", "rejected": "b"}, "my.jsonl has nothing to learn: no completion"),
    ],
)
@pytest.mark.few(1)
def test_a_pair_that_is_none_is_named(record, said, tiny_llm):
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=said):
        fit("preference", f"--model.name_or_path={tiny_llm}", f"--data.path={write('my.jsonl', record)}")


# ---- speech


def record_wave(path, seconds=0.5, rate=16_000, channels=1, width=2):
    """A recording in which the first channel is loud, and the others are silent."""
    import wave

    frame = (1 << (8 * width - 2)).to_bytes(width, "little") + bytes(width) * (channels - 1)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(frame * int(seconds * rate))


@pytest.mark.parametrize("channels, width, heard", [(1, 2, 0.5), (2, 2, 0.25), (1, 4, 0.5), (1, 1, -0.5)])
def test_recordings_are_heard_as_the_mean_of_their_channels(channels, width, heard):
    from examples.speech.data import length, samples

    record_wave("a.wav", channels=channels, width=width)
    assert length("a.wav") == (16_000, 0.5)
    assert len(samples("a.wav")) == 8_000 and set(samples("a.wav").tolist()) == {heard}


def hear(*records, given=(), **options):
    return fit("speech", f"--data.path={write('my.jsonl', *records)}", *given, **options)


@SLOW
def test_a_recognizer_learns_to_write_down_what_it_hears_and_is_exported():
    from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration

    from examples.common import tiny
    from examples.speech.data import samples

    run = fit("speech", steps=96)
    rates = re.findall(r",([0-9.]+)$", (run / "lightning_logs/version_0/metrics.csv").read_text(), re.MULTILINE)
    assert float(rates[0]) == 1.0 and float(rates[-1]) < 0.5
    model, words = (kind.from_pretrained(run / "model") for kind in (WhisperForConditionalGeneration, AutoTokenizer))
    tiny.recordings(pathlib.Path("again"), 4)
    given = json.loads(pathlib.Path("again/recordings.jsonl").read_text().splitlines()[0])
    sound = samples(f"again/{given['audio']}")
    heard = AutoFeatureExtractor.from_pretrained(run / "model")(sound, sampling_rate=16_000, return_tensors="pt")
    (written,) = words.batch_decode(model.eval().generate(**heard, max_length=20), skip_special_tokens=True)
    assert {*written.split()} <= {*tiny.TONES} and len(written.split()) == 3


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: None, r"my.jsonl, line 1: the recording a.wav does not exist"),
        (
            lambda: pathlib.Path("a.wav").write_bytes(b"ID3 this is no WAV"),
            r"a.wav is not a WAV file of plain samples .*ffmpeg",
        ),
        (lambda: record_wave("a.wav", width=3), "a.wav has samples of 24 bits: ffmpeg"),
        (
            lambda: record_wave("a.wav", rate=8_000),
            r"a.wav has 8000 Hz and is 0.5 s long; the model hears 16000 Hz and 1 s",
        ),
        (lambda: record_wave("a.wav", 2.0), r"a.wav has 16000 Hz and is 2.0 s long; the model hears 16000 Hz and 1 s"),
    ],
)
@pytest.mark.few(1)
def test_a_recording_that_can_not_be_heard_is_named(make, said):
    from examples.common.errors import BadInput

    make()
    with pytest.raises(BadInput, match=said):
        hear({"audio": "a.wav", "text": "low"})


@pytest.mark.parametrize(
    "record, given, said",
    [
        ({"audio": "a.wav"}, (), r"line 1 has the keys \['audio'\]; a record needs \"audio\" and \"text\""),
        ({"audio": "a.wav", "text": "low " * 40}, (), r"line 1: a text of \d+ tokens is more than the 32 positions"),
        ({"audio": "a.wav", "text": "low"}, ["--data.language=en"], "data.language=en: .*set_prefix_tokens"),
        ({"audio": "a.wav", "text": "low"}, ["--model.name_or_path=llm"], "llm is a llama, not a whisper"),
    ],
)
@pytest.mark.few(1)
def test_what_a_recognizer_can_not_learn_from_is_named(record, given, said, tiny_llm):
    from examples.common.errors import BadInput

    pathlib.Path("llm").symlink_to(tiny_llm)
    record_wave("a.wav")
    with pytest.raises(BadInput, match=said):
        hear(record, given=given)


@pytest.fixture
def several_languages(tmp_path):
    """A Whisper whose texts begin with the token of their language."""
    from transformers import GenerationConfig, WhisperForConditionalGeneration, WhisperTokenizer

    from examples.common import tiny

    folder = tmp_path / "languages"
    tiny.made(folder, tiny.speech_recognizer)
    core = json.loads(tiny.tokenizer([" ".join(tiny.TONES)]).backend_tokenizer.to_str())["model"]
    words = WhisperTokenizer(vocab=core["vocab"], merges=[tuple(pair) for pair in core["merges"]])
    marks = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|zh|>", "<|de|>", "<|transcribe|>", "<|translate|>"]
    words.add_special_tokens({"extra_special_tokens": [*marks, "<|notimestamps|>"]})
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    model.resize_token_embeddings(len(words))
    ids = {mark: words.convert_tokens_to_ids(mark) for mark in marks}
    start, end = ids["<|startoftranscript|>"], ids["<|endoftext|>"]
    special = {"decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": end}
    for name, token in special.items():
        setattr(model.config, name, token)
    told = {
        "is_multilingual": True,
        "lang_to_id": {mark: ids[mark] for mark in ("<|en|>", "<|de|>")},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": words.convert_tokens_to_ids("<|notimestamps|>"),
    }
    model.generation_config = GenerationConfig(**special, **told)
    for each in (model, words):
        each.save_pretrained(folder)
    return folder


@pytest.mark.seldom
def test_texts_begin_with_their_language(several_languages, monkeypatch):
    from examples.common.errors import BadInput
    from examples.speech.data import SpeechData

    model, seen = f"--model.name_or_path={several_languages}", []
    collate = SpeechData.collate
    monkeypatch.setattr(SpeechData, "collate", lambda self, got: seen.append((self, got)) or collate(self, got))
    record_wave("a.wav")
    hear({"audio": "a.wav", "text": "low"}, given=[model, "--data.language=de", "--data.val_path=my.jsonl"], steps=1)
    data, ((_, tokens),) = seen[-1]
    begun = data.tokenizer.convert_ids_to_tokens(tokens)
    assert begun == ["<|de|>", "<|transcribe|>", "<|notimestamps|>", "low", "<|endoftext|>"]
    with pytest.raises(
        BadInput, match=r"data.language=None, but the model of .* has several: name the texts' language"
    ):
        hear({"audio": "a.wav", "text": "low"}, given=[model])
    with pytest.raises(BadInput, match=r"data.language=klingon: Unsupported language"):
        hear({"audio": "a.wav", "text": "low"}, given=[model, "--data.language=klingon"])


# ---- diffusion


@pytest.fixture
def tiny_unet(tmp_path):
    """A pipeline whose UNet predicts noise, and cached latents for it, as arguments of the recipe."""
    pytest.importorskip("diffusers")
    from examples.common import tiny

    tiny.made(tmp_path / "pipeline", tiny.diffusion_unet)
    tiny.made(tmp_path / "cached", lambda part: tiny.latents(part, 12, pooled=False))
    return [f"--model.name_or_path={tmp_path / 'pipeline'}", f"--data.path={tmp_path / 'cached'}"]


def averaged(folder):
    """The average that a checkpoint has."""
    callbacks = torch.load(last(folder), weights_only=True)["callbacks"]
    return parity.Record(
        [parity.Entry("averaged", path, leaf) for path, leaf in parity.leaves(callbacks["MovingAverage"])]
    )


@SLOW
@pytest.mark.parametrize("arguments", [[], *VARIED], ids=lambda given: "".join(given)[:24])
@pytest.mark.parametrize("train", ["all", "adapters"])
def test_a_unet_learns_as_with_plain_lightning_and_gives_the_same_samples(train, arguments, tiny_unet):
    safetensors = pytest.importorskip("safetensors.torch")
    given = [*tiny_unet, f"--model.train={train}"]
    streamed = fit("diffusion", *given, *arguments, folder="streamed")
    shared = [argument for argument in arguments if "strategy" not in argument]
    plain = fit("diffusion", *given, PLAIN, *shared, folder="plain")
    parity.compare(left(plain), left(streamed))
    parity.compare(averaged(plain), averaged(streamed))
    mine, theirs = (safetensors.load_file(run / "samples.safetensors")["latents"] for run in (streamed, plain))
    assert mine.shape == (4, 3, 16, 16) and torch.equal(mine, theirs)
    assert (streamed / "samples.png").read_bytes() == (plain / "samples.png").read_bytes()


@SLOW
@pytest.mark.parametrize("arguments", [[], *VARIED], ids=lambda given: "".join(given)[:24])
def test_a_whole_diffusion_transformer_learns_as_with_plain_lightning(arguments):
    streamed = fit("diffusion", "--model.train=all", *arguments, folder="streamed")
    shared = [argument for argument in arguments if "strategy" not in argument]
    plain = fit("diffusion", "--model.train=all", PLAIN, *shared, folder="plain")
    parity.compare(left(plain), left(streamed))
    parity.compare(averaged(plain), averaged(streamed))


@SLOW
@pytest.mark.parametrize("train", ["adapters", "all"])
def test_an_average_goes_on_where_it_was(train):
    given = [f"--model.train={train}"]
    through = fit("diffusion", PLAIN, "--trainer.callbacks+=test_recipes.Halfway", *given, steps=4, folder="through")
    resumed = fit("diffusion", "--ckpt_path=half.ckpt", *given, steps=4, folder="resumed")
    parity.compare(averaged(through), averaged(resumed))
    assert (through / "samples.png").read_bytes() == (resumed / "samples.png").read_bytes()


@pytest.mark.seldom
def test_of_a_frozen_diffusion_model_nothing_travels_down_and_the_average_is_exported():
    pytest.importorskip("diffusers")
    from diffusers import SD3Transformer2DModel

    run = fit("diffusion", "--trainer.callbacks+=test_recipes.Moved")
    adapters = torch.load(last(run), weights_only=True)["state_dict"]
    assert all("lora_" in name for name in adapters)
    assert Moved.stats["bytes_down"] == 2 * sum(tensor.nbytes for tensor in adapters.values())
    model = SD3Transformer2DModel.from_pretrained(run / "tiny/diffusion", subfolder="transformer")
    model.load_lora_adapter(run / "model", prefix=None, weight_name="pytorch_lora_weights.safetensors")
    exported = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    expected = [leaf for path, leaf in parity.leaves(torch.load(last(run), weights_only=True)["callbacks"])]
    expected = [leaf for leaf in expected if isinstance(leaf, torch.Tensor) and leaf.ndim == 2]
    assert len(exported) == len(expected) == len(adapters)
    assert all(torch.equal(one, other) for one, other in zip(exported, expected, strict=True))


def diffusion(name, **config):
    """The recipe's module with a scheduler of this class."""
    diffusers = pytest.importorskip("diffusers")
    from examples.diffusion.module import FineTuneDiffusion

    module = FineTuneDiffusion()
    module.scheduler = getattr(diffusers, name)(**config)
    module.flow = "FlowMatch" in name
    return module


def test_a_model_that_predicts_what_it_is_taught_samples_the_latents(monkeypatch):
    """Of flows and of noise: a perfect prediction leads from noise to the latents."""
    latents = torch.rand(4, 3, 8, 8)
    for module in (
        diffusion("FlowMatchEulerDiscreteScheduler", shift=3.0),
        diffusion("DDIMScheduler", clip_sample=False),
        diffusion("DDIMScheduler", clip_sample=False, prediction_type="v_prediction"),
        diffusion("DDIMScheduler", clip_sample=False, prediction_type="sample"),
    ):
        kind = module.scheduler.config.get("prediction_type")

        def perfect(noisy, time, conditions, module=module, kind=kind):
            if module.flow:
                part = (time / 1000).view(-1, 1, 1, 1)
                return (noisy - latents) / part
            kept = module.scheduler.alphas_cumprod[time.long()].view(-1, 1, 1, 1)
            noise = (noisy - kept.sqrt() * latents) / (1 - kept).sqrt()
            velocity = kept.sqrt() * noise - (1 - kept).sqrt() * latents
            return {"epsilon": noise, "v_prediction": velocity, "sample": latents}[kind]

        monkeypatch.setattr(type(module), "__call__", lambda self, *given, perfect=perfect: perfect(*given))
        torch.manual_seed(0)
        noisy, times, target = (module.flowing if module.flow else module.noised)(latents, torch.randn_like(latents))
        torch.testing.assert_close(perfect(noisy, times, {}), target, rtol=1e-2, atol=1e-2)
        found = module.sample(latents.shape, {}, 50)
        torch.testing.assert_close(found, latents, rtol=0.05, atol=0.05, msg=f"{kind}")


def test_conditions_are_given_under_their_names():
    from examples.diffusion.module import FineTuneDiffusion

    module, seen = FineTuneDiffusion(), {}
    module.model = lambda latents, **given: (seen.update(given), torch.cat([latents, -latents], 1))[1:]
    latents, time = torch.ones(1, 3, 2, 2), torch.tensor([5])
    found = module(latents, time, {"a": 1, "added_cond_kwargs.b": 2, "added_cond_kwargs.c": 3})
    assert torch.equal(found, latents)  # the second half is a variance
    assert seen == {"timestep": time, "a": 1, "added_cond_kwargs": {"b": 2, "c": 3}, "return_dict": False}


def cached(name, **tensors):
    from safetensors.torch import save_file

    pathlib.Path("cached").mkdir(exist_ok=True)
    save_file({key: torch.ones(sizes) for key, sizes in tensors.items()}, f"cached/{name}.safetensors")


SD3 = {"latents": (3, 16, 16), "encoder_hidden_states": (4, 32), "pooled_projections": (32,)}


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: None, "the folder of latents cached does not exist"),
        (lambda: pathlib.Path("cached").mkdir(), "cached has no safetensors files"),
        (lambda: cached("a", text=(4, 32)), "cached/a.safetensors has text, but no latents"),
        (lambda: (cached("a", **SD3), cached("b", **SD3 | {"latents": (3, 8, 8)})), "b.safetensors has .* of one size"),
        (
            lambda: cached("a", **SD3, rotary=(4,)),
            "cached has rotary, which SD3Transformer2DModel does not take; it takes encoder_hidden_states, pooled",
        ),
        (
            lambda: (cached("a", **SD3), pathlib.Path("cached/b.safetensors").write_bytes(b"half")),
            "cached/b.safetensors can not be read",
        ),
    ],
)
@pytest.mark.few(1)
def test_cached_latents_that_can_not_be_used_are_named(make, said):
    from examples.common.errors import BadInput

    make()
    with pytest.raises(BadInput, match=said):
        fit("diffusion", "--data.path=cached")


@SLOW
def test_latents_of_any_size_are_batches_of_one():
    cached("a", **SD3)
    cached("b", **SD3 | {"latents": (3, 8, 8)})
    assert (fit("diffusion", "--data.path=cached", "--data.batch_size=1") / "samples.png").exists()


def whole_pipeline(kind):
    """A tiny pipeline with all its parts."""
    diffusers, transformers = (pytest.importorskip(name) for name in ("diffusers", "transformers"))
    from examples.common import tiny

    words = tiny.tokenizer(["a red square", "a blue square"])
    words.model_max_length = 12
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    clip = transformers.CLIPTextConfig(vocab_size=len(words), max_position_embeddings=16, projection_dim=16, **sizes)
    vae = diffusers.AutoencoderKL(
        latent_channels=4,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    if kind == "unet":
        unet = diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 16),
            layers_per_block=1,
            cross_attention_dim=16,
            norm_num_groups=8,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        )
        parts = (vae, transformers.CLIPTextModel(clip), words, unet, diffusers.PNDMScheduler(skip_prk_steps=True))
        pipeline = diffusers.StableDiffusionPipeline(*parts, None, None, requires_safety_checker=False)
    else:
        model = diffusers.SD3Transformer2DModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=32,
            pos_embed_max_size=8,
        )
        t5 = transformers.T5Config(vocab_size=len(words), d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        clips = [each for _ in range(2) for each in (transformers.CLIPTextModelWithProjection(clip), words)]
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
        parts = (model, scheduler, vae, *clips, transformers.T5EncoderModel(t5), words)
        pipeline = diffusers.StableDiffusion3Pipeline(*parts)
    pipeline.save_pretrained("whole")


@pytest.mark.parametrize("kind", ["unet", pytest.param("transformer", marks=SLOW)])
@pytest.mark.seldom
def test_images_and_texts_are_cached_trained_on_and_sampled(kind, capsys):
    from PIL import Image

    from examples.common import tiny
    from examples.diffusion import cache

    pytest.importorskip("torchvision")
    whole_pipeline(kind)
    tiny.image_folder(pathlib.Path("images"), 1)
    lines = [{"image": f"images/{colour}/0.png", "text": f"a {colour} square"} for colour in ("red", "blue")]
    cache.main(["--pipeline=whole", f"--data={write('my.jsonl', *lines)}", "--out=cached", "--size=16"])
    assert "2 images of 16 x 16 are in cached" in capsys.readouterr().out
    run = fit("diffusion", "--model.name_or_path=whole", "--data.path=cached", "--data.batch_size=2")
    assert Image.open(run / "samples.png").size == (32, 16)


@pytest.mark.parametrize(
    "line, said",
    [
        ({"image": "a.png"}, r"my.jsonl, line 1 has the keys \['image'\]; a record needs \"image\" and \"text\""),
        (
            {"image": "a.png", "text": "?"},
            "diffusion is a DiffusionPipeline; this caches for StableDiffusionPipeline, S",
        ),
    ],
)
def test_what_can_not_be_cached_is_named(line, said, tiny_unet):
    from examples.common.errors import BadInput
    from examples.diffusion import cache

    pathlib.Path("diffusion").symlink_to(pathlib.Path("pipeline"))
    with pytest.raises(BadInput, match=said):
        cache.main(["--pipeline=./diffusion", f"--data={write('my.jsonl', line)}", "--out=cached"])


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model.name_or_path=./none"], "the pipeline none does not exist"),
        (["--model.targets=[none]"], r"model.targets=\('none',\): .*not found"),
        (["--model.dtype=floaty"], "model.dtype=floaty is no type of weights"),
    ],
)
@pytest.mark.few(1)
def test_a_pipeline_that_can_not_be_trained_is_named(arguments, said):
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=said):
        fit("diffusion", *arguments)


# ---- by hand


@pytest.mark.seldom
def test_a_loop_by_hand_trains_as_without_streaming(tiny_llm, monkeypatch, capsys):
    from examples import by_hand

    def run(stream, export):
        monkeypatch.setattr(by_hand.sp_lightning, "stream", stream)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        monkeypatch.setattr(sys, "argv", ["by_hand", f"--name-or-path={tiny_llm}", "--steps=3", f"--export={export}"])
        by_hand.main()
        return logits(export)

    streamed = run(sp_lightning.stream, "streamed")
    assert "device peak" in capsys.readouterr().out
    plain = run(lambda *_, **__: contextlib.nullcontext(), "plain")
    assert torch.equal(streamed, plain) and not torch.equal(plain, logits(tiny_llm))


# ---- with Fabric

SMALL = ["--accelerator=cpu", "--layers=3", "--width=32"]
ROWS = ["--context=64", "--batch-size=2"]
LOOPS = {
    "pretrain": [*SMALL, *ROWS, "--steps=10"],
    "lora": [*SMALL, *ROWS, "--steps=10", "--checkpoint=base/model.pt"],
    "generate": [*SMALL, *ROWS, "--steps=20", "--checkpoint=base/model.pt"],
    "gan": [*SMALL, "--steps=20", "--batch-size=8"],
}


def loop(name, strategy, *arguments, out):
    """Runs a loop; gives what its files hold."""
    importlib.import_module(f"examples.fabric.{name}").main([f"--strategy={strategy}", f"--out={out}", *arguments])
    files = [
        (path, torch.load(path) if path.suffix == ".pt" else path.read_text()) for path in pathlib.Path(out).iterdir()
    ]
    found = [(path.name, *leaf) for path, kept in files for leaf in parity.leaves(kept)]
    return parity.Record([parity.Entry(file, path, leaf) for file, path, leaf in found])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.few(1)
def test_a_loop_with_fabric_gives_plain_fabrics_result(name, precision, capsys):
    if "--checkpoint=base/model.pt" in LOOPS[name]:
        loop("pretrain", "auto", *SMALL, *ROWS, "--steps=2", out="base")
    results, printed = [], []
    for strategy in ("auto", "superpipeline"):
        capsys.readouterr()
        results.append(loop(name, strategy, *LOOPS[name], f"--precision={precision}", out=strategy))
        *steps, last = capsys.readouterr().out.splitlines()
        printed.append([*steps, last.split(" | ")[0] if name != "generate" else ""])
        assert ("device peak" in last) == (strategy == "superpipeline")
    parity.compare(*results)
    assert printed[0] == printed[1] and any("step" in line for line in printed[0]) == (name != "generate")
    assert results[0].entries and len(results[0].entries) == len(results[1].entries)


def test_adapters_that_a_loop_trained_change_what_is_generated(capsys):
    loop("pretrain", "auto", *SMALL, *ROWS, "--steps=2", out="base")
    loop("lora", "superpipeline", *LOOPS["lora"], out="adapted")
    adapters = torch.load("adapted/adapters.pt")["model"]
    assert {name.rsplit(".")[-1] for name in adapters} == {"up", "down"} and len(adapters) == 2 * 3 * 4
    given = [*LOOPS["generate"], "--adapters=adapted/adapters.pt"]
    with_them = [loop("generate", strategy, *given, out=strategy) for strategy in ("auto", "superpipeline")]
    parity.compare(*with_them)
    assert loop("generate", "superpipeline", *LOOPS["generate"], out="without").entries != with_them[0].entries


@pytest.mark.parametrize("before, after", [("auto", "superpipeline"), ("superpipeline", "auto")])
@pytest.mark.few(1)
def test_a_loop_that_was_interrupted_goes_on_as_if_it_had_not_been(before, after, monkeypatch):
    from examples.fabric.running import Clock

    arguments = [*SMALL, *ROWS, "--steps=8", "--save-every=3"]
    through = loop("pretrain", "auto", *arguments, out="through")

    def tick(clock):
        clock.seconds.append(0.0)
        if len(clock.seconds) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as interrupting, pytest.raises(KeyboardInterrupt):
        interrupting.setattr(Clock, "tick", tick)
        loop("pretrain", before, *arguments, out="resumed")
    gc.collect()
    assert torch.load("resumed/model.pt")["step"] == 3
    parity.compare(through, loop("pretrain", after, *arguments, "--resume", out="resumed"))


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("pretrain", ["--data=nowhere.txt"], "the text file nowhere.txt does not exist"),
        ("pretrain", ["--context=100000"], "are fewer than two rows of --context 100000"),
        ("pretrain", ["--heads=5"], "a width of 32 cannot be divided into 5 heads"),
        ("lora", ["--checkpoint=nowhere.pt"], "the checkpoint nowhere.pt does not exist"),
        ("generate", ["--steps=60"], "a prompt of 15 bytes and --steps 60 are more than --context 64"),
        ("generate", ["--steps=2", "--adapters=nowhere.pt"], "the file of adapters nowhere.pt does not exist"),
    ],
)
def test_what_a_loop_is_given_is_checked(name, arguments, message):
    from examples.common.errors import BadInput

    with pytest.raises(BadInput, match=message):
        loop(name, "auto", *SMALL, *ROWS, *arguments, out="run")


# ---- with Hugging Face's libraries

SCRIPTS = {
    "sft": ["--steps=3"],
    "sft of adapters": ["--steps=3", "--lora=4", "--bf16"],
    "dpo": ["--steps=3"],
    "grpo": ["--steps=2", "--beta=0.1", "--tokens=4"],
    "loop": ["--steps=3"],
    "loop in bf16": ["--steps=3", "--bf16", "--accumulate=3"],
    "diffusion_lora": ["--steps=3"],
}
SEEDED_ON_HOST = ("grpo",)  # its samples are from the device's generator: compared on the CPU alone


def script_of(name, *arguments, out):
    """Runs a script; gives what it wrote as the trained model."""
    from accelerate.state import AcceleratorState, GradientState
    from safetensors.torch import load_file

    module = name.partition(" ")[0]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    importlib.import_module(f"examples.hf.{module}").main([f"--out={out}", *SCRIPTS[name], *arguments])
    gc.collect()
    files = sorted(pathlib.Path(out, "model").glob("*.safetensors"))
    return parity.Record([parity.Entry(path.name, *leaf) for path in files for leaf in parity.leaves(load_file(path))])


@pytest.mark.parametrize("device", ["cpu", pytest.param("simgpu", marks=[pytest.mark.simgpu, SLOW])])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("sft", "loop", "diffusion_lora") else SLOW) for name in SCRIPTS]
)
@pytest.mark.few(1)
def test_a_script_gives_the_stock_runs_result(name, device, monkeypatch, capsys):
    for package in ("accelerate", "trl", "peft", "diffusers", "torchvision"):
        pytest.importorskip(package)
    if device == "simgpu":
        if name in SEEDED_ON_HOST:
            pytest.skip("the device's generator draws the answers")
        importlib.import_module("simgpu")
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "simgpu:0")
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr("accelerate.accelerator.is_bf16_available", lambda *_, **__: True)
    stock = script_of(name, "--stock", out="stock")
    assert "device peak" not in capsys.readouterr().out or device == "simgpu"
    streamed = script_of(name, "--window=1", out="streamed")
    assert re.search(SUMMARY, said := capsys.readouterr().out) and "device peak" in said
    parity.compare(stock, streamed)
    assert stock.entries

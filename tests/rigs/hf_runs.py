"""Runs of Hugging Face's Trainer, of TRL and of loops with accelerate, stock and streamed, over tiny models.

`compare(run, **options)` calls `run(folder)` twice, and what it yields has to be the same bits. A run is a generator;
`seen` yields all that a trainer leaves, the contents of its checkpoints included.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from side_by_side import assert_plain

import parity
from sp_lightning.hf import streaming

accelerate = pytest.importorskip("accelerate", reason="sp_lightning.hf is for accelerate")
transformers = pytest.importorskip("transformers", reason="these runs are transformers' Trainers")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

Run = Callable[[pathlib.Path], Iterator[Any]]
NOT_THE_SAME = ("runtime", "second", "step_time")  # of logs: times
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
TOKENS, LENGTH = 64, 8

WORDS = [f"w{number}" for number in range(TOKENS - 4)]


def rows(count: int = 16) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, TOKENS, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row.clone(), "attention_mask": torch.ones_like(row)} for row in tokens]


def llama(**options: Any) -> Any:
    sizes = {**SIZES, "vocab_size": TOKENS, "max_position_embeddings": 64, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | options)))


def judge() -> Any:
    sizes = {**SIZES, "vocab_size": TOKENS, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 1}
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes))


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": TOKENS}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    )


def with_adapters() -> Any:
    peft = pytest.importorskip("peft", reason="adapters are peft's")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))


def with_a_prompt() -> Any:
    """A prompt that trains; it is in the rest that stays on the device, and each save computes it by itself."""
    peft = pytest.importorskip("peft", reason="such prompts are peft's")
    return peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def with_adapters_on_4_bits() -> Any:
    """Adapters over linear layers that bitsandbytes packs as ``from_pretrained`` reads them."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="it packs the weights")
    peft = pytest.importorskip("peft", reason="adapters are peft's")
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        llama(hidden_size=64, intermediate_size=64).save_pretrained(folder)
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        made = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    finally:
        shutil.rmtree(folder)
    assert isinstance(made.model.layers[0].mlp.up_proj, bitsandbytes.nn.Linear4bit)
    made = peft.prepare_model_for_kbit_training(made, use_gradient_checkpointing=False)
    return peft.get_peft_model(made, peft.LoraConfig(r=4, target_modules="all-linear"))


def allow_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let accelerate compute in FP16, with a scaler of gradients, on any device: it knows a few by their names."""
    make = accelerate.Accelerator.__init__

    def made(self: Any, *args: Any, mixed_precision: Any = None, **kwargs: Any) -> None:
        make(self, *args, mixed_precision="no", **kwargs)
        assert mixed_precision == "fp16"
        self.state._mixed_precision = "fp16"
        self.native_amp = True
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**20)  # the first steps are skipped

    monkeypatch.setattr(accelerate.Accelerator, "__init__", functools.wraps(make)(made))


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="TRL needs a tokenizer")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


class Fetches(transformers.TrainerCallback):
    """Counts what each step fetches, while anything streams."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.counts.append(fetches())


def fetches() -> int:
    return sum(handle.stats()["fetches"] for one in OPEN for handle in one.handles)


OPEN: list[Any] = []  # the context of the streamed run


def seen(trainer: Any, folder: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Logs, parameters and optimizer state of a trainer, and what is in the files that it wrote."""
    trainer.accelerator.wait_for_everyone()
    for number, entry in enumerate(trainer.state.log_history):
        logged = sorted(key for key in entry if not any(part in key for part in NOT_THE_SAME))
        yield f"log {number}", {key: entry[key] for key in logged}
    yield "parameters", dict(trainer.model.named_parameters())
    if trainer.optimizer is not None:
        yield "state", trainer.optimizer.state_dict()["state"]
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            yield name, load_file(path)
        elif path.name == "optimizer.pt":
            yield name, torch.load(path, weights_only=True, map_location="cpu")
        else:
            yield name, None


def train(
    folder: pathlib.Path,
    make: Callable[[], Any] = llama,
    kind: Any = None,
    arguments: Any = None,
    resume: str | None = None,
    evaluates: bool = True,
    makes_model: bool = False,
    **settings: Any,
) -> Iterator[Any]:
    """Train, evaluate, predict and save as a script with the Trainer does."""
    arguments = arguments or transformers.TrainingArguments
    torch.manual_seed(1)
    model = make()
    defaults = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 1, "seed": 3}
    defaults |= {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    given = {"model_init": lambda: make()} if makes_model else {"model": model}
    trainer = (kind or transformers.Trainer)(
        **given,
        args=arguments(output_dir=str(folder), **(defaults | settings)),
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=[counting := Fetches()],
    )
    trainer.train(resume_from_checkpoint=resume)
    if evaluates:
        trainer.evaluate()
        yield "predictions", trainer.predict(rows(8)).predictions
    trainer.save_model(str(folder / "final"))
    yield from seen(trainer, folder)
    yield "fetches", counting


def record(run: Run, folder: pathlib.Path, options: dict[str, Any] | None) -> tuple[parity.Record, dict[str, Any]]:
    """A run, streamed if there are options, and what its handles counted."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    folder.mkdir(exist_ok=True)  # by another rank
    entries: list[parity.Entry] = []
    found: dict[str, Any] = {"handles": []}
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if options is not None:
            stream = streaming(**options)
            OPEN.append(stack.enter_context(stream))
            stack.callback(OPEN.clear)
        for where, value in run(folder):
            if isinstance(value, Fetches):
                found["fetches"] = value.counts
            else:
                value = torch.as_tensor(value) if hasattr(value, "__array__") else value
                entries += parity.seen(where, value)
        if options is not None:
            found["held_steps"] = [handle.stats()["held_steps"] for handle in stream.handles]
            found["units"] = [handle.stats()["units"] for handle in stream.handles]
            models = [handle.module for handle in stream.handles]
            found["handles"] = [type(model).__name__ for model in models]
    if options is not None:
        for model in models:
            assert_plain_but_prepared(model)
        del models, stream
    gc.collect()
    return parity.Record(entries), found


def assert_plain_but_prepared(model: Any) -> None:
    """Nothing of ours is left; accelerate's own wrapper of ``forward`` stays, as in a stock run."""
    forward = vars(model).pop("forward", None)
    assert_plain(model)
    if forward is not None:
        model.forward = forward
    assert "_hf_hook" not in vars(model) and "_call_impl" not in vars(model)


def compare(run: Run, folder: pathlib.Path, **options: Any) -> dict[str, Any]:
    """Compare a stock run with a streamed one, bit for bit, and return what the latter counted."""
    expected, _ = record(run, folder / "stock", None)
    actual, found = record(run, folder / "streamed", {"window": 1} | options)
    assert found["handles"]
    parity.compare(expected, actual)
    return found

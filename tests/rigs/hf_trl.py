"""Runs of TRL's trainers over tiny models (hf_runs.py)."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from hf_runs import WORDS, Fetches, judge, llama, seen, tokenizer

pytest.importorskip("trl", reason="these runs are TRL's trainers")
datasets = pytest.importorskip("datasets", reason="TRL trains on data sets of datasets")


ANSWERING = ("GRPO", "RLOO", "Distillation")  # trainers that generate what they train on


def data(kind):
    generator = torch.Generator().manual_seed(0)

    def some(count):
        return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (count,), generator=generator))

    makes = {
        "SFT": lambda: {"text": some(8)},
        "DPO": lambda: {"prompt": some(4), "chosen": " " + some(4), "rejected": " " + some(4)},
        "Reward": lambda: {"prompt": some(4), "chosen": " " + some(4), "rejected": " " + some(4)},
        "KTO": lambda: {
            "prompt": some(4),
            "completion": " " + some(4),
            "label": bool(torch.rand((), generator=generator) > 0.5),
        },
        **dict.fromkeys(ANSWERING, lambda: {"prompt": some(4)}),
    }
    return datasets.Dataset.from_list([makes[kind]() for _ in range(8 if kind in ANSWERING else 12)])


def distinct(completions, **_):
    return [float(len(set(text))) for text in completions]


def train(folder, kind, adapters=False, reference=False, judged=False, **settings):
    trl = importlib.import_module("trl")
    torch.manual_seed(1)
    given = {"model": judge() if kind == "Reward" else llama()}
    if reference:
        given["ref_model"] = llama()
    if settings.get("beta") and not adapters:  # TRL loads the reference from where the model came from
        given["model"].save_pretrained(folder / "base")  # by the first rank
        if dist.is_initialized():
            dist.barrier()
        given["model"] = type(given["model"]).from_pretrained(folder / "base", dtype=torch.float32)
    if adapters:
        given["peft_config"] = pytest.importorskip("peft").LoraConfig(r=4, target_modules="all-linear")
    if kind == "Distillation":
        given["teacher_model"] = llama(num_hidden_layers=2)
    if kind in ("GRPO", "RLOO"):
        given["reward_funcs"] = judge() if judged else distinct
        given["reward_processing_classes"] = tokenizer() if judged else None
    defaults = {"num_train_epochs": 1, "logging_steps": 1, "report_to": [], "save_strategy": "no", "seed": 3}
    defaults |= {"disable_tqdm": True, "bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 4}
    trainer = getattr(trl, f"{kind}Trainer")(
        **given,
        args=getattr(trl, f"{kind}Config")(output_dir=str(folder), **(defaults | settings)),
        train_dataset=data(kind),
        processing_class=tokenizer(),
        callbacks=[counting := Fetches()],
    )
    trainer.train()
    trainer.save_model(str(folder / "final"))
    yield from seen(trainer, folder)
    yield "fetches", counting

"""TRL's trainers leave the same bits when their models stream: student, reference and reward model."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from hf_runs import WORDS, Fetches, compare, judge, llama, seen, tokenizer

pytest.importorskip("trl", reason="these runs are TRL's trainers")
datasets = pytest.importorskip("datasets", reason="TRL trains on data sets of datasets")

EACH_OTHER = {"num_generations": 2, "max_completion_length": 4}


@pytest.fixture(autouse=True)
def one_cache(monkeypatch, tmp_path):
    """A fingerprint of a data set hashes what it is mapped by, which takes longer than the run."""
    monkeypatch.setattr("datasets.fingerprint.Hasher.hash", classmethod(lambda *_: "0" * 16))
    datasets.disable_caching()
    datasets.disable_progress_bars()
    yield
    datasets.enable_caching()
    datasets.enable_progress_bars()


def data(kind):
    generator = torch.Generator().manual_seed(0)

    def some(count):
        return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (count,), generator=generator))

    makes = {
        "SFT": lambda: {"text": some(8)},
        "DPO": lambda: {"prompt": some(4), "chosen": " " + some(4), "rejected": " " + some(4)},
        "Reward": lambda: {"prompt": some(4), "chosen": " " + some(4), "rejected": " " + some(4)},
        "GRPO": lambda: {"prompt": some(4)},
    }
    return datasets.Dataset.from_list([makes[kind]() for _ in range(8 if kind == "GRPO" else 12)])


def distinct(completions, **_):
    return [float(len(set(text))) for text in completions]


def train(folder, kind, adapters=False, reference=False, **settings):
    trl = importlib.import_module("trl")
    torch.manual_seed(1)
    given = {"model": judge() if kind == "Reward" else llama()}
    if reference:
        given["ref_model"] = llama()
    if settings.get("beta") and not adapters:  # TRL loads the reference from where the model came from
        given["model"].save_pretrained(folder / "base")
        given["model"] = type(given["model"]).from_pretrained(folder / "base", dtype=torch.float32)
    if adapters:
        given["peft_config"] = pytest.importorskip("peft").LoraConfig(r=4, target_modules="all-linear")
    if kind == "GRPO":
        given["reward_funcs"] = distinct
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


RUNS = {
    "SFT": {"kind": "SFT"},
    "SFT, checkpointing and accumulating": {"kind": "SFT", "gradient_checkpointing": True}
    | {"gradient_accumulation_steps": 2},
    "SFT of adapters": {"kind": "SFT", "adapters": True},
    "SFT in bf16": {"kind": "SFT", "bf16": True},
    "DPO with a reference": {"kind": "DPO", "reference": True},
    "DPO of adapters": {"kind": "DPO", "adapters": True},
    "DPO, precomputed": {"kind": "DPO", "reference": True, "precompute_ref_log_probs": True},
    "Reward": {"kind": "Reward"},
    "GRPO": {"kind": "GRPO", **EACH_OTHER},
    "GRPO with a reference": {"kind": "GRPO", "beta": 0.1, **EACH_OTHER},
    "GRPO of adapters with a reference": {"kind": "GRPO", "beta": 0.1, "adapters": True, **EACH_OTHER},
}
DAILY = ("SFT", "DPO with a reference", "GRPO")


def marks(run, device):
    found = [pytest.mark.simgpu] if device == "simgpu" else []
    return found if run in DAILY and device == "simgpu" else [*found, pytest.mark.slow]


COMBINATIONS = [
    pytest.param(run, device, marks=marks(run, device), id=f"{run}-{device}")
    for run in RUNS
    for device in ("simgpu", "cpu")
]


@pytest.mark.parametrize("run, device", COMBINATIONS, indirect=["device"])
def test_trl_leaves_the_bits_of_the_stock_run(run, device, tmp_path):
    found = compare(functools.partial(train, **RUNS[run]), tmp_path)
    assert found["handles"]
    if run.startswith(("SFT", "DPO with", "Reward")):
        assert sum(found["held_steps"]) == len(found["fetches"]) - 1, found["why"]  # the first one makes the state
    if run in ("DPO with a reference", "GRPO with a reference"):
        assert len(found["handles"]) == 2

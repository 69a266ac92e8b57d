"""The trainer of sentence-transformers leaves the same bits when its model streams, and so does ``encode``."""

from __future__ import annotations

import importlib

import pytest
import torch
from hf_runs import SIZES, TOKENS, Fetches, compare, seen, tokenizer, transformers

st = pytest.importorskip("sentence_transformers", reason="these runs are its trainer's")
datasets = pytest.importorskip("datasets", reason="it trains on data sets of datasets")


def train(folder):
    torch.manual_seed(1)
    transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=TOKENS)).save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    modules = importlib.import_module("sentence_transformers.models")
    words = modules.Transformer(str(folder / "base"), max_seq_length=16)
    model = st.SentenceTransformer(modules=[words, modules.Pooling(SIZES["hidden_size"])], device=_device())
    rows = [{"anchor": f"w{row} w{row + 1}", "positive": f"w{row} w{row + 2}"} for row in range(16)]
    defaults = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no"}
    trainer = st.SentenceTransformerTrainer(
        model=model,
        args=st.SentenceTransformerTrainingArguments(str(folder / "out"), **defaults, report_to=[], disable_tqdm=True),
        train_dataset=datasets.Dataset.from_list(rows),
        loss=importlib.import_module("sentence_transformers.losses").MultipleNegativesRankingLoss(model),
        callbacks=[counting := Fetches()],
    )
    trainer.train()
    yield "encoded", torch.as_tensor(model.encode(["w1 w2 w3", "w7"]))
    model.save_pretrained(str(folder / "final"))
    yield from seen(trainer, folder / "final")
    yield "fetches", counting


def _device():
    import accelerate

    return str(accelerate.PartialState().device)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("simgpu", marks=[pytest.mark.simgpu, pytest.mark.slow])], indirect=True
)
def test_its_trainer_leaves_the_bits_of_the_stock_run(device, tmp_path):
    found = compare(train, tmp_path)
    assert "SentenceTransformer" in found["handles"] and found["fetches"][-1] > found["fetches"][0]

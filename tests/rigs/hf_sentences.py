"""Runs of the trainer of sentence-transformers over a tiny model (hf_runs.py)."""

from __future__ import annotations

import importlib

import pytest
import torch
from hf_runs import SIZES, TOKENS, Fetches, accelerate, seen, tokenizer, transformers

st = pytest.importorskip("sentence_transformers", reason="these runs are its trainer's")
datasets = pytest.importorskip("datasets", reason="it trains on data sets of datasets")


LOSSES = {
    "negatives": lambda losses, model, guide: losses.MultipleNegativesRankingLoss(model),
    "cached": lambda losses, model, guide: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
    "guided": lambda losses, model, guide: losses.GISTEmbedLoss(model, guide),  # which goes to where the model is
}


def make(folder, device):
    transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=TOKENS)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    accelerate.PartialState().wait_for_everyone()  # the first rank writes the weights
    modules = importlib.import_module("sentence_transformers.models")
    words = modules.Transformer(str(folder), max_seq_length=16)
    return st.SentenceTransformer(modules=[words, modules.Pooling(SIZES["hidden_size"])], device=device)


def train(folder, loss, **settings):
    torch.manual_seed(1)
    defaults = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no"}
    defaults |= {"report_to": [], "disable_tqdm": True} | settings
    args = st.SentenceTransformerTrainingArguments(str(folder / "out"), **defaults)
    model, guide = make(folder / "base", str(args.device)), make(folder / "guide", "cpu")
    rows = [{"anchor": f"w{row} w{row + 1}", "positive": f"w{row} w{row + 2}"} for row in range(16)]
    trainer = st.SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        loss=LOSSES[loss](importlib.import_module("sentence_transformers.losses"), model, guide),
        callbacks=[counting := Fetches()],
    )
    trainer.train()
    yield "encoded", torch.as_tensor(model.encode(["w1 w2 w3", "w7"]))
    model.save_pretrained(str(folder / "final"))
    yield from seen(trainer, folder / "final")
    yield "fetches", counting

"""Train a language model in a plain PyTorch loop, without Lightning, with its weights streamed.

python -m examples.by_hand [--name-or-path DIRECTORY_OR_NAME] [--steps 20] [--window 2] [--export DIRECTORY]
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import sp_lightning

from .common import tiny
from .common.chats import documents
from .common.checkpoints import read_jsonl


def train(model, loader, device, steps):
    """Train in an ordinary loop: between steps the weights are on the host."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(loader)
    for step in range(steps):
        batch = next(batches, None) or next(batches := iter(loader))
        loss = model(**batch.to(device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name-or-path", help="a checkpoint's directory or its name on the hub; default: a tiny Llama")
    parser.add_argument("--data", default="examples/data/chats.jsonl")
    parser.add_argument("--export", help="where the trained model is written")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--window", type=int, default=2)
    given = parser.parse_args()

    torch.manual_seed(0)
    checkpoint = given.name_or_path or tiny.language_model()
    words = AutoTokenizer.from_pretrained(checkpoint)
    found = [document for record in read_jsonl(given.data) for document in documents(record, words, 1024)]
    rows = [{"input_ids": tokens, "labels": labels} for tokens, labels in found]
    loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=DataCollatorForSeq2Seq(words))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with sp_lightning.stream(model, device, window=given.window, activations="recompute"):
        train(model, loader, device, given.steps)
    if given.export:
        model.save_pretrained(given.export)  # the model is plain again, on the host


if __name__ == "__main__":
    main()

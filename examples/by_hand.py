"""Trains a language model in a plain PyTorch loop, without Lightning, with its weights streamed.

python -m examples.by_hand [--name-or-path DIRECTORY_OR_NAME] [--data FILE.jsonl] [--steps 50] [--window 2]
"""

import logging
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import sp_lightning
from sp_lightning.cli import OneLineParser

from .common import tiny
from .common.checkpoints import check_length, load, load_config, load_tokenizer
from .common.errors import in_one_line, positive
from .common.files import read_jsonl
from .common.packing import check_apart
from .common.summary import device_peak, line, plain_nbytes
from .common.text import collate, encode, pack


def blocks_of_tokens(arguments, checkpoint):
    """The data, packed."""
    tokenizer = load_tokenizer(checkpoint, checkpoint)
    check_length(arguments.block_size, load_config(checkpoint), checkpoint)
    documents = [encode(record, tokenizer, where) for where, record in read_jsonl(arguments.data)]
    return pack(documents, arguments.block_size, tokenizer.eos_token_id)


def train(arguments, model, rows, handle, device):
    """An ordinary loop: the optimizer steps on the host, where the weights are."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    loader = DataLoader(rows, arguments.batch_size, shuffle=True, collate_fn=collate)
    begin, step = 0.0, 0
    while step < arguments.steps:
        for batch in loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == 1:  # the first makes what later ones use
                begin = time.perf_counter()
            if step == arguments.steps:
                break
    step_ms = (time.perf_counter() - begin) * 1e3 / max(step - 1, 1)
    print(line(loss.item(), device_peak(device, handle), plain_nbytes(model, [optimizer]), step_ms / 1e3))


def main():
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name-or-path", help="a checkpoint directory or a name on the hub; default: a tiny model")
    parser.add_argument("--data", help="a JSONL file; default: sums")
    parser.add_argument("--export", type=Path, help="where the trained model is written")
    parser.add_argument("--steps", type=positive, default=50)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=positive, default=4)
    parser.add_argument("--block-size", type=positive, default=128)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.name_or_path or str(tiny.made(Path(folder) / "llm", tiny.language_model))
        if arguments.data is None:
            arguments.data = tiny.made(
                Path(folder) / "chats.jsonl", lambda part: tiny.write_jsonl(part, tiny.chats(400))
            )
        rows = blocks_of_tokens(arguments, checkpoint)
        model = load(AutoModelForCausalLM, checkpoint)
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        with sp_lightning.stream(model, device, window=arguments.window, activations="recompute") as handle:
            check_apart(model, device)
            train(arguments, model, rows, handle, device)
        if arguments.export is not None:  # the model is plain again, on the host
            model.save_pretrained(arguments.export)


if __name__ == "__main__":
    with in_one_line():
        main()

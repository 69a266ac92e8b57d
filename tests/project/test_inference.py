"""What docs/inference.md promises: bytes of a token, batches that share a trip, speculation that saves trips."""

from __future__ import annotations

import pathlib

import lightning as L
import pytest
import torch

import sp_lightning

transformers = pytest.importorskip("transformers")

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "inference.md"
LINK, TOKENS, PAD = 25e9, 1024, 0
SIZES = {  # published config.json files: hidden, intermediate, layers, heads, vocabulary, and a tied embedding
    "Llama 3.2 3B": (3072, 8192, 28, 24, 128256, True),
    "Llama 3.1 8B": (4096, 14336, 32, 32, 128256, False),
    "Llama 3.1 70B": (8192, 28672, 80, 64, 128256, False),
}


def llama(hidden, intermediate, layers, heads, vocabulary, tied=False):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            vocab_size=vocabulary,
            tie_word_embeddings=tied,
            pad_token_id=PAD,
        )
    ).eval()


def small():
    torch.manual_seed(0)
    return llama(64, 128, 4, 8, 99)


def brought_up(make_answers):
    """The bytes that travel up, and the answer, of calls of ``generate`` without anything on the device before."""
    model = small()
    with sp_lightning.stream(model, "cpu", window=1) as handle:
        answer = make_answers(model)
        return handle.stats()["bytes_up"], answer


@pytest.mark.parametrize("name", SIZES)
def test_the_table_of_bytes_per_token_is_its_arithmetic(name):
    with torch.device("meta"):
        model = llama(*SIZES[name])
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    config = model.config
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * TOKENS * 2
    cells = [f"{weights / 1e9:.2f} GB"]
    for rows in 1, 8, 32:
        rate = rows * LINK / weights
        cells.append(f"{weights / rows / 1e9:.2f} GB, {f'{rate:.0f}' if rate >= 10 else f'{rate:.1f}'}/s")
    row = f"| {name} | {' | '.join([*cells, f'{cache / 1e6:.0f} MB'])} |"
    assert row in PAGE.read_text().splitlines()


@pytest.mark.parametrize("rows", [8, 32])
def test_all_rows_of_a_batch_share_each_trip(rows):
    def answers(count):
        ids = torch.randint(1, 99, (count, 7), generator=torch.Generator().manual_seed(0))
        return lambda model: model.generate(ids, min_new_tokens=5, max_new_tokens=5, do_sample=False)

    assert brought_up(answers(rows))[0] == brought_up(answers(1))[0] > 0


def test_left_padded_rows_have_the_plain_runs_tokens():
    prompts = [torch.arange(1, length + 1) for length in (3, 9, 5)]
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=PAD, padding_side="left")

    class Answers(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = small()

        def predict_step(self, batch):
            mask = (batch != PAD).long()
            return self.model.generate(batch, attention_mask=mask, max_new_tokens=6, do_sample=False)

    found = []
    for strategy in "auto", "superpipeline":
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "devices": 1}
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", **quiet)
        found.append(torch.cat(trainer.predict(Answers(), torch.utils.data.DataLoader(ids, batch_size=3))))
    assert torch.equal(*found) and found[0].shape == (3, 9 + 6)


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_speculation_makes_fewer_trips_for_the_same_tokens(how):
    """The draft is the model itself, so its guesses are accepted; the prompt ends with an answer's own beginning."""
    asked = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    begin = torch.arange(1, 8)[None]
    alone = small().generate(begin, **asked)
    prompt = torch.cat([alone, begin], dim=1) if how == "prompt lookup" else begin
    more = {"prompt_lookup_num_tokens": 4} if how == "prompt lookup" else {"assistant_model": small()}
    bytes_alone, expected = brought_up(lambda model: model.generate(prompt, **asked))
    bytes_guessed, found = brought_up(lambda model: model.generate(prompt, **asked, **more))
    assert torch.equal(found, expected) and bytes_guessed < bytes_alone

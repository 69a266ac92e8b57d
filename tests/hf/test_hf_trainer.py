"""transformers' Trainers leave the same bits when their models stream: logs, weights, state, checkpoints."""

from __future__ import annotations

import functools
import itertools

import hf_runs
import pytest
import transformers
from hf_runs import allow_fp16, compare, llama, record, t5, train, with_a_prompt, with_adapters, with_adapters_on_4_bits

import parity

SEQ2SEQ = {"kind": transformers.Seq2SeqTrainer, "arguments": transformers.Seq2SeqTrainingArguments}
WINDOWS = {"window 1": {"window": 1}, "window 2": {"window": 2, "activations": "recompute"}}
STEPS = {"save_strategy": "steps"}
SETTINGS = {
    "plain": {"num_train_epochs": 2},
    "without clipping": {"max_grad_norm": 0.0},
    "accumulating": {"gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "the best": {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True} | STEPS,
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "bf16 and evaluation in it": {"bf16": True, "bf16_full_eval": True},
    "fp16": {"fp16": True, "gradient_accumulation_steps": 2},
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd"},
    "adapters": {"make": with_adapters},
    "adapters on a base of 4 bits": {"make": with_adapters_on_4_bits, "bf16": True},
    "a prompt": {"make": with_a_prompt, "label_names": ["labels"]},
    "noise": {"neftune_noise_alpha": 5.0},
    "tied": {"make": functools.partial(llama, tie_word_embeddings=True)},
    "smoothing": {"label_smoothing_factor": 0.1},
    "made by model_init": {"makes_model": True},
    "evaluation first": {"eval_on_start": True},
    "a fused optimizer": {"optim": "adamw_torch_fused"},
    "8-bit optimizer state": {"optim": "adamw_bnb_8bit"},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "generating": {**SEQ2SEQ, "make": t5, "predict_with_generate": True, "generation_max_length": 6},
}
DAILY = {  # every other combination is slow
    ("plain", "window 1", "simgpu"),
    ("accumulating", "window 2", "cpu"),
    ("the best", "window 2", "simgpu"),
    ("checkpointing", "window 1", "simgpu"),
    ("bf16", "window 2", "simgpu"),
    ("adapters", "window 1", "simgpu"),
    ("generating", "window 1", "simgpu"),
}


ON_CPU = (
    "8-bit optimizer state",
    "compiled",
    "adapters on a base of 4 bits",
)  # bitsandbytes, and the compiler, have no simulated device


def combinations():
    for setting in SETTINGS:
        for window in WINDOWS:
            for device in {"fp16": ["simgpu"]}.get(setting, parity.DEVICES if setting not in ON_CPU else ["cpu"]):
                marks = [pytest.mark.simgpu] if device == "simgpu" else []
                marks += [] if (setting, window, device) in DAILY else [pytest.mark.slow]
                yield pytest.param(setting, window, device, marks=marks, id=f"{setting}-{window}-{device}")


@pytest.mark.parametrize("setting, window, device", list(combinations()), indirect=["device"])
@pytest.mark.few(1)
def test_a_trainer_leaves_the_bits_of_the_stock_run(setting, window, device, tmp_path, monkeypatch):
    if setting == "fp16":
        allow_fp16(monkeypatch)
    compare(functools.partial(train, **SETTINGS[setting]), tmp_path, **WINDOWS[window])


@pytest.mark.few(1)
def test_steps_are_deferred_and_fetch_what_a_step_of_lightnings_does(device, tmp_path):
    _, found = record(functools.partial(train, num_train_epochs=3), tmp_path / "streamed", {"window": 1})
    assert found["held_steps"] == [11] and found["why"] == []  # of 12: the first one makes the state
    counts = found["fetches"]
    assert [after - before for before, after in itertools.pairwise(counts[1:])] == [fetched(device)] * 10


def fetched(device):
    """The fetches of a step of the Lightning strategy over the same model, with gradients that are clipped."""
    import lightning as L
    import torch
    from side_by_side import make_trainer

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.counts = llama(), []

        def training_step(self, batch, index):
            self.counts.append(self.trainer.strategy.handle.stats()["fetches"])
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 5e-5)

    if device.type == "simgpu":
        import importlib

        importlib.import_module("simgpu.lightning")
    module = Module()
    loader = torch.utils.data.DataLoader(hf_runs.rows(), batch_size=4)
    strategy = parity.streaming_strategy(device.type, window=1)
    make_trainer(strategy, device, max_steps=4, gradient_clip_val=1.0).fit(module, loader)
    return module.counts[-1] - module.counts[-2]


@pytest.mark.parametrize("device", [pytest.param("simgpu", marks=pytest.mark.simgpu)], indirect=True)
@pytest.mark.parametrize(
    "first, second",
    [
        (None, {"window": 1}),
        pytest.param({"window": 1}, None, marks=pytest.mark.slow),
        pytest.param({"window": 2}, {"window": 1}, marks=pytest.mark.slow),
    ],
    ids=["stock, then streamed", "streamed, then stock", "streamed twice"],
)
def test_a_run_resumes_from_the_others_checkpoint(first, second, device, tmp_path):
    """A checkpoint in the middle of the run, of which the rest is trained again."""
    settings = {"save_strategy": "steps", "save_steps": 2, "evaluates": False, "lr_scheduler_type": "constant"}
    whole, _ = record(functools.partial(train, **settings), tmp_path / "whole", None)
    record(functools.partial(train, **settings, max_steps=2), tmp_path / "first", first)
    resumes = functools.partial(train, **settings, resume=str(tmp_path / "first" / "checkpoint-2"))
    rest, _ = record(resumes, tmp_path / "second", second)

    def last(run):
        kept = [e for e in run.entries if not e.where.startswith("checkpoint-2")]
        return parity.Record([e for e in kept if e.what not in ("train_loss", "total_flos")])  # of this call alone

    parity.compare(last(whole), last(rest))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_state_that_a_run_resumes_with_is_on_the_disk_before_any_step(optim, device, tmp_path):
    """And nothing is left in the file that it was read from, which is mapped meanwhile."""
    settings = {"optim": optim, "save_strategy": "steps", "save_steps": 2, "evaluates": False}
    record(functools.partial(train, **settings, max_steps=2), tmp_path / "first", None)
    checkpoint = tmp_path / "first" / "checkpoint-2"
    whole, _ = record(functools.partial(train, **settings, resume=str(checkpoint)), tmp_path / "stock", None)
    seen = []

    class Looks(transformers.Trainer):
        def _load_scaler(self, folder):  # which comes next
            (checkpoint / "optimizer.pt").write_bytes(b"")
            (handle,) = hf_runs.OPEN[0].handles
            place_of = handle.storage.state._file.place_of
            state = self.optimizer.state.values()
            seen.extend(place_of(one[name]) is not None for one in state for name in ("exp_avg", "exp_avg_sq"))
            return super()._load_scaler(folder)

    resumes = functools.partial(train, **settings, kind=Looks, resume=str(checkpoint))
    disk = tmp_path / "disk"
    disk.mkdir()
    rest, _ = record(resumes, tmp_path / "streamed", {"window": 1, "disk": str(disk), "host_budget": "0B"})
    assert seen and all(seen)
    parity.compare(whole, rest)

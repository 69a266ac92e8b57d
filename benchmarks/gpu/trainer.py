"""Train through Hugging Face's Trainer, stock and inside `sp_lightning.hf.streaming`: bits, time and memory.

    python benchmarks/gpu/trainer.py [--steps 12] [--minutes 9]

Every run has a process of its own: stock, streamed, and streamed with optimizer_device="device", whose optimizer steps
where stock's does. Bar: that one has the losses, gradient norms and weights of stock, to the last bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import campaign
import torch

LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
TINY = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
RUNS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "streamed": {"window": 2},
    "streamed, optimizer on the device": {"window": 2, "optimizer_device": "device"},
}
WARM_UP = 3  # steps that are not timed


def train(small: bool, options: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    """Train, and return losses, gradient norms, a digest of all weights, the median time of a step and the peak."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    import sp_lightning.hf

    class Clock(TrainerCallback):
        """Notes when each step ends on the device."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    class Reader(Trainer):
        """Keeps what it logs."""

        def log(self, logs: dict[str, float], *_: Any, **__: Any) -> None:
            logged.append({name: logs[name] for name in ("loss", "grad_norm") if name in logs})

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    logged: list[dict[str, float]] = []
    clock, generator = Clock(), torch.Generator().manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**(TINY if small else LLAMA), use_cache=False))
    length = 64 if small else 2048
    tokens = torch.randint(512 if small else 128256, (4 * steps, length), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=steps, bf16=True, logging_steps=1, report_to=[],
            save_strategy="no", gradient_checkpointing=options is None, disable_tqdm=True, learning_rate=1e-4,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )  # fmt: skip
        streaming = contextlib.nullcontext()
        if options is not None:
            streaming = sp_lightning.hf.streaming(activations="recompute", **options)
        with streaming:
            Reader(model, arguments, train_dataset=rows, callbacks=[clock]).train()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    taken = [end - begin for begin, end in zip(clock.ends[WARM_UP:], clock.ends[WARM_UP + 1 :], strict=False)]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {
        "logged": logged,
        "weights": digest.hexdigest(),
        "step_s": {"median": statistics.median(taken)},
        "device_peak": peak,
        "error": None,
    }


def in_a_process(run: campaign.Campaign, options: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    """Train in a process of its own."""
    order = {"small": run.small, "options": options, "steps": steps}
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | ({"CUDA_VISIBLE_DEVICES": ""} if run.device == "cpu" else {})
    nothing = {"error": "ended: no time left", "step_s": None, "device_peak": None}
    try:
        return nothing | run.in_a_process(__file__, "--one", order, **environment)
    except subprocess.TimeoutExpired:
        return nothing


def bar(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare the run whose optimizer is on the device with stock."""
    stock, ours = rows["stock"], rows["streamed, optimizer on the device"]
    differ = [name for name in ("logged", "weights") if stock.get(name) is None or stock.get(name) != ours.get(name)]
    measured = "the same bits" if not differ else f"other bits: {', '.join(differ)}"
    return {"bar": "losses, gradient norms and weights of stock", "measured": measured, "reached": not differ}


def main() -> int:
    parser = campaign.parser(__doc__)
    parser.add_argument("--steps", type=int, default=12, help="steps of a run (default: 12)")
    parser.add_argument("--one", help="used by the campaign itself")
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(train(**json.loads(options.one))) + "\n")
        return 0
    run = campaign.Campaign("trainer", options)
    rows: dict[str, dict[str, Any]] = {}
    entry: dict[str, Any] = {"label": "llama-1b, 8192 tokens, recompute", "bars": [], "rows": []}
    run.add(entry)
    for label, own in RUNS.items():
        contender = "stock" if own is None else "superpipeline"
        rows[label] = {"label": label, "contender": contender, "options": own or {}}
        rows[label] |= in_a_process(run, own, options.steps)
        entry["rows"].append(rows[label])
        run.save()
        found = rows[label]["error"] or f"{rows[label]['step_s']['median'] * 1e3:,.0f} ms"
        run.say(f"{label:36} {found}")
    verdict = bar(rows)
    entry["bars"].append(verdict)
    run.save()
    run.say(f"{'reached' if verdict['reached'] else 'MISSED'}  {verdict['bar']}: {verdict['measured']}")
    return 0 if verdict["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())

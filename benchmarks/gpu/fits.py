"""Models that fit on the device: plain Lightning against this strategy at several windows and tokens per step.

    python benchmarks/gpu/fits.py [--model llama-3b] [--tokens 32768] [--minutes 9]

The most telling comparisons come first. Bars: at 32K tokens per step and at most a quarter of plain's weights,
gradients and optimizer state on the device, 95 % of its speed; 85 % at 16K; 60 % less device memory at 1.2 x its time,
85 % less with activations="recompute+offload"; floor / step of 0.85 everywhere.
"""

from __future__ import annotations

import sys

import campaign
from measured import Comparison, memory, merit, others, ours, run_all, speed

SEQ = 2048
LANGUAGE = {"precision": "bf16-mixed", "optimizer": "adamw", "clip": 1.0, "seq": SEQ, "steps": 3, "repetitions": 2}
SPEED = {32768: 0.95, 16384: 0.85}


def language(model: str, tokens: int, activations: str = "keep") -> Comparison:
    setting = {**LANGUAGE, "model": model, "batch": max(1, tokens // SEQ), "activations": activations}
    bars = [merit(0.85)] + ([speed(SPEED[tokens], 0.25)] if tokens in SPEED and activations == "keep" else [])
    bars += [memory(0.60, 1.2)] if activations == "keep" else []
    label = f"{model}, {tokens} tokens" + ("" if activations == "keep" else f", {activations}")
    return Comparison(label, setting, [*others("plain"), *ours(3, "all")], bars)


def picture(model: str, batch: int, **more: object) -> Comparison:
    setting = {**LANGUAGE, "seq": None, "model": model, "batch": batch, **more}
    return Comparison(f"{model}, batch {batch}", setting, [*others("plain"), *ours(3, "all")], [memory(0.60, 1.2)])


def lean(model: str, tokens: int) -> Comparison:
    """As little device memory as can be, against plain with everything kept."""
    base = language(model, tokens)
    rows = [*others("plain"), *ours(2, activations="recompute+offload")]
    return Comparison(f"{base.label}, recompute+offload", base.setting, rows, [memory(0.85, float("inf"))])


COMPARISONS = [
    language("llama-3b", 32768),
    language("llama-3b", 16384),
    lean("llama-3b", 16384),
    picture("vit-h", 128),
    picture("llava-1b", 8),
    language("llama-1b", 32768),
    *(language("llama-1b", tokens) for tokens in (16384, 8192, 4096, 2048)),
    *(language("llama-3b", tokens) for tokens in (65536, 8192, 4096, 2048)),
]


def main() -> int:
    parser = campaign.parser(__doc__)
    parser.add_argument("--model", help="only comparisons with this in their name")
    parser.add_argument("--tokens", help="only comparisons of so many tokens")
    options = parser.parse_args()
    chosen = [c for c in COMPARISONS if (options.model or "") in c.label and f"{options.tokens or ''}" in c.label]
    return run_all(campaign.Campaign("fits", options), chosen)


if __name__ == "__main__":
    sys.exit(main())

"""Compare models that fit on the device: plain Lightning and this strategy, by windows and tokens per step.

    python benchmarks/gpu/fits.py [--model llama-3b] [--tokens 32768] [--minutes 9]
    python benchmarks/gpu/fits.py --predict h200  # the plan's predictions, on any machine

The most important comparisons come first. Both sides recompute their blocks where plain Lightning would not fit
otherwise. Bars: at 32K tokens per step, 95 % of plain's speed with at most a quarter of its weights, gradients and
optimizer state on the device; 85 % at 16K; where weights, gradients and state are most of the memory, 60 % less device
memory in under 1.2 x the time; 85 % less with activations="recompute+offload"; steps 1.18 times planned ones at most.
"""

from __future__ import annotations

import sys

from measured import Comparison, begin, memory, merit, others, ours, parser, speed

SEQ = 2048
SETTING = {"precision": "bf16-mixed", "steps": 3, "repetitions": 2}
SPEED = {32768: 0.95, 16384: 0.85}


def language(model: str, tokens: int, activations: str = "recompute", *, saves: bool = False) -> Comparison:
    setting = {**SETTING, "model": model, "seq": SEQ, "batch": max(1, tokens // SEQ), "activations": activations}
    bars = [merit(0.85)] + ([speed(SPEED[tokens], 0.25)] if tokens in SPEED else [])
    bars += [memory(0.60, 1.2)] if saves else []
    return Comparison(f"{model}, {tokens} tokens, {activations}", setting, [*others("plain"), *ours(3, "auto")], bars)


def lean(model: str, tokens: int) -> Comparison:
    """Compare plain Lightning with the settings that need the least device memory."""
    setting = {**SETTING, "model": model, "seq": SEQ, "batch": tokens // SEQ, "activations": "recompute"}
    rows = [*others("plain"), *ours(1, 2, activations="recompute+offload")]
    return Comparison(f"{model}, {tokens} tokens, recompute+offload", setting, rows, [memory(0.85, float("inf"))])


def stepped(model: str, tokens: int) -> Comparison:
    """Compare steps of the optimizer on the host and on the device, where the host's would take longest."""
    setting = {**SETTING, "model": model, "seq": SEQ, "batch": tokens // SEQ, "activations": "recompute"}
    rows = [*others("plain"), *ours(3), *ours(3, optimizer_device="device")]
    return Comparison(f"{model}, {tokens} tokens, recompute, stepped on the device", setting, rows)


COMPARISONS = [
    language("llama-3b", 32768),
    language("llama-3b", 16384),
    language("llama-3b", 14336, saves=True),
    lean("llama-3b", 4096),
    stepped("llama-3b", 4096),
    language("llama-1b", 16384, "keep"),
    *(language("llama-1b", tokens) for tokens in (32768, 16384, 8192, 4096, 2048)),
    *(language("llama-3b", tokens) for tokens in (65536, 8192, 4096, 2048)),
]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--model", help="only comparisons with this in their name")
    arguments.add_argument("--tokens", help="only comparisons with this number of tokens")
    options = arguments.parse_args()
    chosen = [c for c in COMPARISONS if (options.model or "") in c.label and f"{options.tokens or ''}" in c.label]
    return begin("fits", options, chosen)


if __name__ == "__main__":
    sys.exit(main())

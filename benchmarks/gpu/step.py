"""Measure clipped steps of Llama 3B beside plain Lightning and beside what others offload to the host.

    python benchmarks/gpu/step.py [--only 16384] [--row resident] [--minutes 9]
    python benchmarks/gpu/step.py --predict h200  # the plan's predictions, on any machine

FP32 weights and AdamW, bf16-mixed, recomputed blocks. Bars: 0.85 of plain's speed at 16K tokens and 0.95 at 32K, with
at most a quarter of its weights, gradients and state on the device; at 8K 3 x DeepSpeed's speed and 5 x FSDP2's.
"""

from __future__ import annotations

import sys

import torch
from measured import Comparison, ahead, begin, others, ours, parser, speed
from shapes import build

SEQ = 2048
SPEED = {16384: 0.85, 32768: 0.95}
PEERS = {"deepspeed": 3.0, "fsdp2": 5.0}


def quarter(model: str) -> str:
    """Return a quarter of the weights, gradients and AdamW state of a model, as an option."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build(model).parameters())
    return f"{4 * parameters}B"


def steps(model: str, tokens: int, share: str) -> Comparison:
    """Compare steps of this many tokens."""
    setting = {"model": model, "batch": tokens // SEQ, "seq": SEQ, "precision": "bf16-mixed", "repetitions": 1}
    setting |= {"activations": "recompute", "steps": 3}
    rows = [*others("plain"), *(row for stays in (share, "auto", 0) for row in ours("auto", resident=stays))]
    label = f"{model}, {tokens} tokens, clipped"
    if tokens in SPEED:
        return Comparison(label, setting, rows, [speed(SPEED[tokens], 0.25)])
    return Comparison(label, setting, rows + others(*PEERS, "torchao"), [ahead(*peer) for peer in PEERS.items()])


def main() -> int:
    options = parser(__doc__).parse_args()
    share = quarter("llama-tiny" if options.small else "llama-3b")
    return begin("step", options, [steps("llama-3b", tokens, share) for tokens in (16384, 8192, 32768)])


if __name__ == "__main__":
    sys.exit(main())

"""Train through Hugging Face's Trainer with its defaults, stock and inside `sp_lightning.hf.streaming`.

    python benchmarks/gpu/trainer.py [--only llama-1b] [--minutes 9]

Its defaults are fused AdamW and gradients clipped at 1. Bar: at most 1.5 x stock's time, at 8,192 tokens a step.
"""

from __future__ import annotations

import sys

from measured import Comparison, begin, others, ours, parser, speed

SLOWDOWN = 1.5


def trained(model: str) -> Comparison:
    setting = {"model": model, "batch": 4, "seq": 2048, "precision": "bf16-mixed", "activations": "recompute"}
    setting |= {"door": "transformers", "fused": True, "steps": 5, "repetitions": 2}
    return Comparison(f"{model}, 8192 tokens, Trainer", setting, others("plain") + ours("auto"), [speed(1 / SLOWDOWN)])


def main() -> int:
    return begin("trainer", parser(__doc__).parse_args(), [trained("llama-1b"), trained("llama-3b")])


if __name__ == "__main__":
    sys.exit(main())

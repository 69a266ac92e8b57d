"""Libraries of language models."""

import json
import random
import sys
from pathlib import Path
from typing import Any

from .harness import client

PASSED = "`Fabric(strategy='superpipeline')`, passed to `litgpt.finetune.lora.main`"
NEEDS = "its command line makes a Fabric of its own; its functions take yours"


@client("litgpt", "fabric", PASSED, NEEDS)
def litgpt(strategy: str) -> Any:
    """LoRA fine-tuning of a small GPT: accumulation, validation, generation with a cache, saving and merging."""
    import torch
    from lightning.fabric import Fabric
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.data import JSON
    from litgpt.finetune.lora import main
    from litgpt.lora import Config as LoraConfig
    from litgpt.model import GPT
    from litgpt.utils import save_config

    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 256, "padded_vocab_size": 256, "block_size": 256}
    lora = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05}  # the defaults, which its merging takes for given
    base = Path("base")
    base.mkdir()
    torch.save(GPT(Config(name="tiny", **sizes)).state_dict(), base / "lit_model.pth")
    save_config(Config(name="tiny", **sizes), base)
    tokenizer(base)
    draw = random.Random(0)
    sums = [(draw.randrange(9), draw.randrange(9)) for _ in range(24)]
    Path("sums.json").write_text(json.dumps([{"instruction": f"{a}+{b}", "output": str(a + b)} for a, b in sums]))
    sys.argv[1:] = ["base"]  # it saves the command line of its own program beside the weights
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    main(
        fabric,
        devices=1,
        seed=0,
        config=LoraConfig(name="tiny", lora_query=True, lora_value=True, **lora, **sizes),
        data=JSON(Path("sums.json"), val_split_fraction=0.25, num_workers=0),
        checkpoint_dir=base,
        out_dir=Path("out"),
        train=TrainArgs(global_batch_size=4, micro_batch_size=2, epochs=2, lr_warmup_steps=1, save_interval=3),
        eval=EvalArgs(interval=3, max_new_tokens=5, max_iters=2, initial_validation=True, final_validation=True),
        optimizer="AdamW",
        precision="32-true",
    )
    return [torch.load(path) for path in sorted(Path("out").rglob("*.pth*"))]


def tokenizer(folder: Path) -> None:
    """Write a tokenizer of characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    characters = {chr(code): index for index, code in enumerate([*range(32, 127), 10])}
    made = Tokenizer(models.WordLevel({**characters, "<s>": len(characters)}, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )

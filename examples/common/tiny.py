"""Tiny models and images, made on the spot: what a recipe runs on when no model is named.

They are written as the files that a user would bring, and read by the code that reads those.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

DATA = Path(__file__).parents[1] / "data"
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220), "yellow": (230, 220, 50)}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def made(name: str, make: Callable[[Path], None]) -> str:
    """Return the folder of that name, which is made if it is not there, without touching the run's random numbers."""
    folder = Path("runs/tiny", name)
    if not folder.exists():
        part = folder.with_name(f"{name}.{os.getpid()}")  # of several processes, each makes the same
        part.mkdir(parents=True)
        alone = mock.patch("torch.distributed.is_initialized", return_value=False)  # else transformers saves on rank 0
        with alone, torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            make(part)
        try:
            part.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(part)
    return str(folder)


def language_model() -> str:
    """Return the directory of a Llama of four layers."""
    return made("llama", _llama)


def image_classifier() -> str:
    """Return the directory of a ViT of four layers."""
    return made("vit", _vit)


def vision_language_model() -> str:
    """Return the directory of a LLaVA of three layers on either side."""
    return made("llava", _llava)


def diffusion_pipeline() -> str:
    """Return the directory of a pipeline as Stable Diffusion 3's."""
    return made("sd3", _sd3)


def squares() -> str:
    """Return a folder of painted squares: a folder for each colour, and captions.jsonl, which tells their colours."""
    return made("squares", _squares)


def tokenizer(*special: str) -> Any:
    """Train a byte-level tokenizer with a chat template on the recipes' chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train(
        [str(DATA / "chats.jsonl")],
        trainers.BpeTrainer(
            vocab_size=384,
            special_tokens=["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", *special],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=CHAT_TEMPLATE, extra_special_tokens=list(special), **ends
    )


def llama_config(words: Any) -> Any:
    """Return the sizes of a Llama of four layers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )


def _llama(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    words = tokenizer()
    LlamaForCausalLM(llama_config(words)).save_pretrained(folder)
    words.save_pretrained(folder)


def _vit(folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=4, **sizes)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


def _llava(folder: Path) -> None:
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    words = tokenizer("<image>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=32, patch_size=8, projection_dim=64, **sizes),
        text_config=llama_config(words),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=words,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=(
            "{% for message in messages %}<|{{ message['role'] }}|>{% for part in message['content'] %}"
            "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}</s>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    ).save_pretrained(folder)


def _sd3(folder: Path) -> None:
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Config, T5EncoderModel

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    words = CLIPTokenizer(vocab={token: place for place, token in enumerate(tokens)}, merges=[], model_max_length=24)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = CLIPTextConfig(vocab_size=len(tokens), max_position_embeddings=24, projection_dim=32, **sizes)
    text.eos_token_id = words.eos_token_id
    StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=64,
            pooled_projection_dim=64,
            pos_embed_max_size=8,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL(
            latent_channels=4,
            block_out_channels=(8, 8),
            norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0,
        ),
        text_encoder=CLIPTextModelWithProjection(text),
        tokenizer=words,
        text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer_2=words,
        text_encoder_3=T5EncoderModel(
            T5Config(vocab_size=384, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
        ),
        tokenizer_3=tokenizer(),
    ).save_pretrained(folder)


def _squares(folder: Path) -> None:
    from PIL import Image

    draw, lines = random.Random(0), []
    for index in range(32):
        colour = [*COLOURS][index % len(COLOURS)]
        image = Image.new("RGB", (48, 48), (90, 90, 90))
        left, top = draw.randrange(16), draw.randrange(16)
        image.paste(COLOURS[colour], (left, top, left + 24, top + 24))
        file = folder / colour / f"{index}.png"
        file.parent.mkdir(exist_ok=True)
        image.save(file)
        said = {"prompt": "What colour is the square?", "completion": f"It is {colour}."}
        lines.append(json.dumps({"image": f"{colour}/{index}.png", "text": f"a {colour} square", **said}))
    (folder / "captions.jsonl").write_text("\n".join(lines) + "\n")

"""Tiny checkpoints and data, made on the spot: what a recipe runs on when it is given none of its own.

They are written where the run writes, as the files that a user would bring, and read by the code that reads those.
Each is made once, whole or not at all, and draws its random numbers without touching the run's. Of several devices the
first one's process makes it: transformers writes nothing in the others, which wait.
"""

import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

from .files import whole

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220), "yellow": (230, 220, 50)}
WAIT_S = 1800  # for the process of the first device, as long as DDP waits
ANIMALS, THINGS = ("cat", "dog", "owl", "fox"), ("stone", "leaf", "boat", "lamp")


def place(trainer: L.Trainer) -> Path:
    """Where a run keeps what it made for itself."""
    return Path(trainer.default_root_dir) / "tiny"


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """The file or folder, made if it is not there yet; the run's random numbers stay what they were."""
    until = time.monotonic() + WAIT_S
    while rank_zero_only.rank and not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"the process of the first device did not make {path} within {WAIT_S} s")
        time.sleep(0.05)
    if not path.exists():
        # Wherever a plain strategy wants what is made, it is made from the host's numbers.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), whole(path) as part:
            torch.manual_seed(0)
            make(part)
    return path


# ---- text


def sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences that a small model can learn: of what was seen first follows what is seen then."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        animal, thing, colour = draw.choice(ANIMALS), draw.choice(THINGS), draw.choice(list(COLOURS))
        found.append(f"The {animal} sees a {colour} {thing} and then another {thing}, which is {colour} too.")
    return found


def chats(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Sums, asked and answered."""
    draw = random.Random(seed)
    found: list[dict[str, object]] = []
    for _ in range(count):
        a, b = draw.randrange(20), draw.randrange(20)
        question, answer = f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found.append({"messages": messages})
    return found


def write_jsonl(path: Path, records: Iterable[object]) -> None:
    """One record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def tokenizer(texts: Iterable[str], vocabulary: int = 384, extra: Iterable[str] = ()) -> Any:
    """A byte-level BPE tokenizer with a chat template, trained on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", *extra]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=list(extra),
        padding_side="left",
    )


def sizes(words: Any) -> dict[str, Any]:
    """Of the tiny language models."""
    return {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": words.pad_token_id,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
    }


def language_model(folder: Path) -> None:
    """A checkpoint directory: a Llama of four layers in several shards, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer([*sentences(200), json.dumps(chats(200))])
    LlamaForCausalLM(LlamaConfig(**sizes(words))).save_pretrained(folder, max_shard_size="400KB")
    words.save_pretrained(folder)


def teacher(folder: Path) -> None:
    """A checkpoint directory: a Llama of six wider layers with opinions, and the same tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer([*sentences(200), json.dumps(chats(200))])
    wide = {**sizes(words), "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6}
    LlamaForCausalLM(LlamaConfig(**wide, initializer_range=0.2)).save_pretrained(folder)
    words.save_pretrained(folder)


def mixture(folder: Path) -> None:
    """A checkpoint directory: a Mixtral of four layers with eight experts each, and its tokenizer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    words = tokenizer([*sentences(200), json.dumps(chats(200))])
    config = MixtralConfig(**sizes(words), num_local_experts=8, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


# ---- images


def painted(colour: str, draw: random.Random, size: int = 48) -> Any:
    """A square of a colour, somewhere on grey."""
    from PIL import Image

    image = Image.new("RGB", (size, size), (90, 90, 90))
    left, top = draw.randrange(size // 3), draw.randrange(size // 3)
    image.paste(COLOURS[colour], (left, top, left + size // 2, top + size // 2))
    return image


def image_folder(folder: Path, count: int) -> None:
    """A folder of images for each colour."""
    draw = random.Random(count)
    for colour in COLOURS:
        (folder / colour).mkdir(parents=True)
        for index in range(count):
            painted(colour, draw).save(folder / colour / f"{index}.png")


def image_classifier(folder: Path) -> None:
    """A checkpoint directory: a ViT of four layers."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.1,
    )
    ViTForImageClassification(config).save_pretrained(folder)


def captions(folder: Path, count: int) -> None:
    """Images of squares, and a file that asks and tells their colours."""
    image_folder(folder, count)
    asked = {"prompt": "What colour is the square?"}
    write_jsonl(
        folder / "captions.jsonl",
        [
            {"image": f"{colour}/{index}.png", **asked, "completion": f"It is {colour}."}
            for colour in COLOURS
            for index in range(count)
        ],
    )


def vision_language_model(folder: Path) -> None:
    """A checkpoint directory: a LLaVA with a tower and a language model of three layers each, and its processor."""
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    texts = [*sentences(100), *(f"What colour is the square? It is {colour}." for colour in COLOURS)]
    words = tokenizer(texts, extra=["<image>"])
    words.chat_template = None
    tower = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        projection_dim=64,
    )
    config = LlavaConfig(
        vision_config=tower,
        text_config=LlamaConfig(**{**sizes(words), "num_hidden_layers": 3}),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    LlavaProcessor(
        image_processor=images,
        tokenizer=words,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


# ---- sound

TONES = {"low": 220, "middle": 440, "high": 880, "shrill": 1760}


def recordings(folder: Path, count: int) -> None:
    """Recordings of three tones each, and a file that names them."""
    import wave

    folder.mkdir()
    draw, records = random.Random(count), []
    for index in range(count):
        words = draw.choices(list(TONES), k=3)
        times = torch.arange(4800) / 16_000
        sound = torch.cat([torch.sin(2 * torch.pi * TONES[word] * times) for word in words])
        with wave.open(str(folder / f"{index}.wav"), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes((sound * 20_000).to(torch.int16).numpy().tobytes())
        records.append({"audio": f"{index}.wav", "text": " ".join(words)})
    write_jsonl(folder / "recordings.jsonl", records)


def speech_recognizer(folder: Path) -> None:
    """A checkpoint directory: a Whisper of three layers on either side that hears one second, and its tokenizer."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    words = tokenizer([" ".join(TONES)])
    config = WhisperConfig(
        vocab_size=len(words),
        num_mel_bins=16,
        d_model=64,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=50,
        max_target_positions=32,
        dropout=0.1,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        decoder_start_token_id=words.bos_token_id,
        begin_suppress_tokens=None,
    )
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    words.save_pretrained(folder)


# ---- latents


def latents(folder: Path, count: int, pooled: bool = True) -> None:
    """Files of painted squares, and of numbers that stand for a text about each colour."""
    from safetensors.torch import save_file

    folder.mkdir()
    draw = random.Random(count)
    texts = {colour: torch.randn(4, 32) for colour in COLOURS}
    for index in range(count):
        colour = [*COLOURS][index % len(COLOURS)]
        pixels = torch.tensor([*painted(colour, draw, size=16).tobytes()], dtype=torch.float32).view(16, 16, 3)
        record = {"latents": (pixels.permute(2, 0, 1) / 127.5 - 1).contiguous(), "encoder_hidden_states": texts[colour]}
        if pooled:
            record["pooled_projections"] = texts[colour].mean(0)
        save_file(record, folder / f"{index:03}.safetensors")


def pipeline(folder: Path, part: str, model: Any, scheduler: Any) -> None:
    """A directory with a model and a scheduler, as diffusers keeps a pipeline."""
    model.save_pretrained(folder / part)
    scheduler.save_pretrained(folder / "scheduler")
    index = {name: ["diffusers", type(kept).__name__] for name, kept in ((part, model), ("scheduler", scheduler))}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "DiffusionPipeline", **index}))


def diffusion_transformer(folder: Path) -> None:
    """A pipeline's directory: a transformer of four blocks that predicts flows."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=3,
        out_channels=3,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    )
    pipeline(folder, "transformer", model, FlowMatchEulerDiscreteScheduler(shift=3.0))


def diffusion_unet(folder: Path) -> None:
    """A pipeline's directory: a UNet of two levels that predicts noise."""
    from diffusers import DDIMScheduler, UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    pipeline(folder, "unet", model, DDIMScheduler())

"""Train adapters of a text-to-image model in a loop with accelerate, as diffusers' own training scripts do.

python -m examples.hf.diffusion_lora [--name-or-path NAME] [--data images.jsonl]
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from ..common import tiny
from ..common.errors import in_one_line, positive
from ..common.files import read_image, read_jsonl
from . import running


def text_to_image(folder: Path) -> None:
    """Make a pipeline's directory: a tiny text encoder, autoencoder and UNet."""
    folder.mkdir()
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    words = CLIPTokenizer(vocab={token: place for place, token in enumerate(tokens)}, merges=[], model_max_length=16)
    words.save_pretrained(folder / "tokenizer")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    CLIPTextModel(CLIPTextConfig(vocab_size=len(tokens), max_position_embeddings=16, **sizes)).save_pretrained(
        folder / "text_encoder"
    )
    AutoencoderKL(
        latent_channels=4,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).save_pretrained(folder / "vae")
    UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).save_pretrained(folder / "unet")
    DDPMScheduler().save_pretrained(folder / "scheduler")


def squares(folder: Path) -> list[dict[str, str]]:
    """Paint images in this folder, and return a record of each."""
    draw, found = random.Random(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(16):
        colour = [*tiny.COLOURS][index % len(tiny.COLOURS)]
        tiny.painted(colour, draw, size=16).save(folder / f"{index}.png")
        found.append({"image": str(folder / f"{index}.png"), "text": f"a {colour} square"})
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Train on records of ``{"image", "text"}``, and write the adapters to ``--out``."""
    parser = running.parser(__doc__, steps=20)
    parser.add_argument("--lora", type=int, default=4, help="rank of the adapters; default: %(default)s")
    parser.add_argument("--size", type=positive, default=16, help="pixels of an image's side; default: %(default)s")
    arguments = parser.parse_args(given)
    base = running.checkpoint(arguments, text_to_image)
    images = running.data(arguments, "images.jsonl", lambda: squares(arguments.out / "tiny" / "images"))
    words = CLIPTokenizer.from_pretrained(base, subfolder="tokenizer")

    def batch_of(records: list[dict[str, Any]]) -> dict[str, Any]:
        sides = (arguments.size, arguments.size)
        pixels = [pil_to_tensor(read_image(record["image"]).convert("RGB").resize(sides)) for record in records]
        texts = words([r["text"] for r in records], padding="max_length", truncation=True, return_tensors="pt")
        return {"pixels": torch.stack(pixels) / 127.5 - 1, "ids": texts["input_ids"]}

    with running.streamed(arguments) as stream:
        accelerator = Accelerator(mixed_precision="bf16" if arguments.bf16 else "no")
        dtype = torch.bfloat16 if arguments.bf16 else torch.float32
        noises = DDPMScheduler.from_pretrained(base, subfolder="scheduler")
        encoder = CLIPTextModel.from_pretrained(base, subfolder="text_encoder").requires_grad_(False)
        vae = AutoencoderKL.from_pretrained(base, subfolder="vae").requires_grad_(False)
        unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet").requires_grad_(False)
        for model in (encoder, vae, unet):
            model.to(accelerator.device, dtype=dtype)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        unet.add_adapter(LoraConfig(r=arguments.lora, lora_alpha=arguments.lora, target_modules=targets))
        trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.data = parameter.data.float()
        optimizer = torch.optim.AdamW(trained, arguments.lr)
        rows = [record for _, record in read_jsonl(images)]
        loader = DataLoader(rows, arguments.batch_size, shuffle=True, collate_fn=batch_of)  # type: ignore[arg-type]
        unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
        unet.train()
        clock = running.Clock()
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for batch in itertools.islice(batches, arguments.steps):
            with accelerator.accumulate(unet):
                with torch.no_grad():
                    latents = vae.encode(batch["pixels"].to(dtype)).latent_dist.mode() * vae.config.scaling_factor
                    hidden = encoder(batch["ids"])[0]
                noise = torch.randn(latents.shape).to(latents)  # the host's numbers, on any device
                times = torch.randint(noises.config.num_train_timesteps, (len(latents),)).to(latents.device)
                guess = unet(noises.add_noise(latents, noise, times), times, hidden, return_dict=False)[0]
                loss = (guess.float() - noise.float()).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            clock.tick()
        model = accelerator.unwrap_model(unet)
        StableDiffusionPipeline.save_lora_weights(arguments.out / "model", get_peft_model_state_dict(model))
        running.say(clock, stream, loss.item(), model, optimizer, accelerator.device)


if __name__ == "__main__":
    with in_one_line():
        main()

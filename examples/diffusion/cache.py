"""Cache the latents of images and the embeddings of their texts, as examples/diffusion trains on them:

    python -m examples.diffusion.cache --pipeline stabilityai/stable-diffusion-3.5-large --data my.jsonl --out latents

A line of the data file is ``{"image": "a.png", "text": "..."}``; images are looked for from where the file is. Each is
scaled to fill a square, and cut to it. The part of the pipeline that is trained is not read.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from sp_lightning.cli import OneLineParser

from ..common.checkpoints import dtype_of, read
from ..common.errors import BadInput, in_one_line, positive
from ..common.files import read_image, read_jsonl, whole

NAMES = {  # of what a pipeline's encode_prompt returns that its model is given
    "StableDiffusionPipeline": ("encoder_hidden_states", None),
    "StableDiffusion3Pipeline": ("encoder_hidden_states", None, "pooled_projections", None),
}
UNREAD = {"transformer", "unet", "safety_checker", "feature_extractor"}


class Index:
    """The parts of a pipeline, and its class."""

    @staticmethod
    def from_pretrained(path: str) -> dict[str, Any]:
        from diffusers import DiffusionPipeline

        index = DiffusionPipeline.load_config(path)
        parts = {name: part for name, part in index.items() if isinstance(part, (list, tuple)) and all(part)}
        return {**parts, "_class_name": index.get("_class_name")}


def texts(pipeline: Any, text: str) -> dict[str, torch.Tensor]:
    """What the model is given for a text."""
    more = {"prompt_2": text, "prompt_3": text} if "text_encoder_3" in pipeline.components else {}
    options = {"device": pipeline.vae.device, "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    found = pipeline.encode_prompt(text, **more, **options)
    names = NAMES[type(pipeline).__name__]
    return {name: value[0] for name, value in zip(names, found, strict=True) if name is not None}


def latents(vae: Any, image: Any, size: int) -> torch.Tensor:
    """An image's, at their most likely."""
    from torchvision.transforms import v2

    square = v2.Compose([v2.ToImage(), v2.Resize(size), v2.CenterCrop(size), v2.ToDtype(torch.float32, scale=True)])
    pixels = (square(image)[None] * 2 - 1).to(vae.device, vae.dtype)
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    return ((vae.encode(pixels).latent_dist.mode() - shift) * vae.config.scaling_factor)[0]


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Write a file for each line."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", required=True, help="a directory, or a name on the hub")
    parser.add_argument("--data", required=True, help="a JSONL file")
    parser.add_argument("--out", required=True, help="a folder that is made")
    parser.add_argument("--size", type=positive, default=512, help="width and height of images (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of the pipeline's weights (default: %(default)s)")
    given = parser.parse_args(arguments)
    from diffusers import DiffusionPipeline
    from safetensors.torch import save_file

    records = read_jsonl(given.data)
    for where, record in records:
        if not all(isinstance(record.get(key), str) for key in ("image", "text")):
            raise BadInput(f'{where} has the keys {sorted(record)}; a record needs "image" and "text" (texts)')
    index = read(Index, given.pipeline, "the pipeline")
    if index["_class_name"] not in NAMES:
        raise BadInput(f"{given.pipeline} is a {index['_class_name']}; this caches for {', '.join(NAMES)}")
    parts = UNREAD & {*index}
    pipeline = read(
        DiffusionPipeline, given.pipeline, "the pipeline", torch_dtype=dtype_of(given.dtype), **dict.fromkeys(parts)
    )
    device = torch.accelerator.current_accelerator(check_available=True)
    pipeline.to(device or "cpu")
    with whole(Path(given.out)) as folder:
        folder.mkdir()
        for number, (_, record) in enumerate(records):
            image = read_image(str(Path(given.data).parent / record["image"]))
            cached = {"latents": latents(pipeline.vae, image, given.size), **texts(pipeline, record["text"])}
            cached = {name: value.cpu().contiguous() for name, value in cached.items()}
            save_file(cached, folder / f"{number:06}.safetensors")
    print(f"{len(records)} images of {given.size} x {given.size} are in {given.out}")


if __name__ == "__main__":
    with in_one_line():
        main()

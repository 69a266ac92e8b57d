"""Write below each recipe's command for a real model what it needs, from the planner alone.

    python docs/make_needs.py

Each command is planned as `python -m sp_lightning plan` plans it, with the smallest window unless its config has one.
The models' published sizes are below; their tokenizers and the data are stand-ins, which do not change what is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sp_lightning.commands import config  # noqa: E402
from sp_lightning.options import format_bytes  # noqa: E402
from sp_lightning.plan import Plan, plan  # noqa: E402

PAGE = ROOT / "docs" / "recipes.md"
COMMAND = re.compile(
    r"```bash\npython -m sp_lightning (?:fit|predict) --config examples/(\w+)/config\.yaml (--.*?)\n```\n\n(.*?)\n\n",
    re.DOTALL,
)
NEEDS = "Needs "
NO_PLAN = {"classify", "embed"}  # neither train nor generate
DATA = {  # what stands for the data of a recipe, if not for that of all
    "finetune_vlm": "pictures/my.jsonl",
    "describe": "pictures",
    "preference": "pairs.jsonl",
    "speech": "recordings/recordings.jsonl",
    "diffusion": "latents",
}
PROMPT = 512  # tokens of each
WHERE = {
    "moe": ", if every expert gets as many tokens",
    "predict": f", for prompts of {PROMPT} tokens",
    "diffusion": ", for images of 1024 by 1024",
}
WHISPER_LARGE = {"layers": 32, "attention_heads": 20, "ffn_dim": 5120}
SD35_LARGE = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 38,
    "attention_head_dim": 64,
    "num_attention_heads": 38,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 2432,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}


def make_stand_ins() -> None:
    """Make the models, without weights, and the data that the commands name, in the current directory."""
    import transformers as hf

    from examples.common import tiny
    from examples.preference import module as preference

    random.seed(0)
    words = tiny.tokenizer(tiny.sentences(200), extra=["<image>"])
    mixtral = hf.MixtralConfig(architectures=["MixtralForCausalLM"], dtype="bfloat16")  # whose sizes are the defaults
    mixtral.save_pretrained("mistralai/Mixtral-8x7B-v0.1")
    words.save_pretrained("mistralai/Mixtral-8x7B-v0.1")
    llamas(words)
    tower = hf.CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    text = hf.LlamaConfig(vocab_size=32064, max_position_embeddings=4096)
    words.chat_template = None
    place = words.convert_tokens_to_ids("<image>")
    hf.LlavaConfig(vision_config=tower, text_config=text, image_token_index=place).save_pretrained(
        "llava-hf/llava-1.5-7b-hf"
    )
    square = {"height": 336, "width": 336}
    hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(size={"shortest_edge": 336}, crop_size=square),
        tokenizer=words,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained("llava-hf/llava-1.5-7b-hf")
    whisper("openai/whisper-large-v3")
    tiny.recordings(pathlib.Path("recordings"), 8)
    stable_diffusion("stabilityai/stable-diffusion-3.5-large", pathlib.Path("latents"))
    tiny.write_jsonl(pathlib.Path("pairs.jsonl"), preference.sums(40))
    tiny.captions(pathlib.Path("pictures"), 8)
    (pathlib.Path("pictures") / "captions.jsonl").rename("pictures/my.jsonl")
    tiny.write_jsonl(pathlib.Path("my.jsonl"), tiny.chats(400))
    for part in ("train", "val"):
        tiny.image_folder(pathlib.Path("images") / part, 20)
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = (" ".join("".join(random.choices(letters, k=7)) for _ in range(10)) for _ in range(12_000))
    pathlib.Path("corpus.txt").write_text("\n\n".join(lines))


def llamas(words: Any) -> None:
    """Make Llamas, each with this tokenizer."""
    import transformers as hf

    llama = {"vocab_size": 128256, "max_position_embeddings": 131072, "num_key_value_heads": 8, "dtype": "bfloat16"}
    for name, hidden, intermediate, layers, heads in (
        ("meta-llama/Llama-3.2-1B", 2048, 8192, 16, 32),
        ("meta-llama/Llama-3.1-8B", 4096, 14336, 32, 32),
        ("meta-llama/Llama-3.1-70B", 8192, 28672, 80, 64),
        ("meta-llama/Llama-3.1-70B-Instruct", 8192, 28672, 80, 64),
    ):
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": heads, "tie_word_embeddings": layers == 16}
        hf.LlamaConfig(**llama, **sizes, architectures=["LlamaForCausalLM"]).save_pretrained(name)
        words.save_pretrained(name)


def whisper(folder: str) -> None:
    """Make a Whisper of several languages, and what makes features of sound."""
    import transformers as hf

    marks = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"]
    words = hf.WhisperTokenizer(vocab={letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz")})
    words.add_special_tokens({"extra_special_tokens": marks})
    words.save_pretrained(folder)
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in WHISPER_LARGE.items()}
    end = words.convert_tokens_to_ids("<|endoftext|>")
    config = hf.WhisperConfig(
        vocab_size=51866,
        num_mel_bins=128,
        d_model=1280,
        dtype="float16",
        architectures=["WhisperForConditionalGeneration"],
        **sides,
    )
    config.pad_token_id = config.eos_token_id = end
    config.save_pretrained(folder)
    hf.GenerationConfig(is_multilingual=True, eos_token_id=end, pad_token_id=end).save_pretrained(folder)
    hf.WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)


def stable_diffusion(folder: str, latents: pathlib.Path) -> None:
    """Make the pipeline of Stable Diffusion 3.5 without weights, and cached latents of four images."""
    import diffusers
    import torch
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = diffusers.SD3Transformer2DModel(**SD35_LARGE)
    model.save_config(f"{folder}/transformer")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(f"{folder}/scheduler")
    parts = {"transformer": ["diffusers", "SD3Transformer2DModel"]}
    parts |= {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}
    pathlib.Path(folder, "model_index.json").write_text(json.dumps({"_class_name": "DiffusionPipeline", **parts}))
    latents.mkdir()
    for index in range(4):
        record = {"latents": (16, 128, 128), "encoder_hidden_states": (333, 4096), "pooled_projections": (2048,)}
        save_file({name: torch.zeros(shape) for name, shape in record.items()}, latents / f"{index}.safetensors")


def planned(recipe: str, arguments: str) -> Plan:
    """Plan a recipe's command."""
    import torch

    given = shlex.split(arguments.replace("\\\n", " "))
    if recipe in DATA:
        given = [DATA[recipe] if word in ("my.jsonl", "held_out.jsonl", "photos") else word for word in given]
    run = config.find(["--config", str(ROOT / "examples" / recipe / "config.yaml"), *given])
    if recipe == "predict":
        run["batch"] = {"input_ids": torch.zeros(len(run["batch"]["input_ids"]), PROMPT, dtype=torch.long)}
    if run.get("window", "auto") == "auto":
        run["window"] = 1
    return plan(**run | {"machine": "h200", "name": recipe})


def sentence(found: Plan) -> str:
    """Say what a plan needs."""
    device, host = format_bytes(found.device_nbytes), format_bytes(found.host.total)
    said = f"{NEEDS}{device} of device memory and {host} of RAM"
    return f"{said}{WHERE.get(found.model, '')}."


def written(page: str, sentences: dict[str, str]) -> str:
    """Return the page with these sentences below the recipes' commands."""

    def replaced(match: re.Match[str]) -> str:
        recipe, _, below = match.groups()
        before = match[0].removesuffix(f"{below}\n\n")
        rest = "" if below.startswith(NEEDS) else f"{below}\n\n"
        return f"{before}{sentences[recipe]}\n\n{rest}"

    return COMMAND.sub(replaced, page)


def needs(page: str) -> dict[str, str]:
    """Plan all commands of the page."""
    with tempfile.TemporaryDirectory() as folder, inside(folder):
        make_stand_ins()
        return {match[1]: sentence(planned(match[1], match[2])) for match in COMMAND.finditer(page)}


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """Work in a folder."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> None:
    """Write the sentences into the page."""
    page = PAGE.read_text()
    PAGE.write_text(written(page, needs(page)))


if __name__ == "__main__":
    main()

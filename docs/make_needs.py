"""Write below each recipe's command for a real model what it needs, from the planner alone.

    python docs/make_needs.py

Each command is planned as `python -m sp_lightning plan` plans it, with the smallest window unless its config has one.
The models' published sizes are below; their tokenizers and the data are stand-ins, which do not change what is needed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sp_lightning.commands import fit_config  # noqa: E402
from sp_lightning.options import format_bytes  # noqa: E402
from sp_lightning.planning import Plan, plan  # noqa: E402

PAGE = ROOT / "docs" / "recipes.md"
COMMAND = re.compile(
    r"```bash\npython -m sp_lightning fit --config examples/(\w+)/config\.yaml (--.*?)\n```\n\n(.*?)\n\n", re.DOTALL
)
RECIPES = "finetune_llm", "lora_llm", "finetune_vision", "finetune_vlm", "moe", "pretrain_small"  # that are planned
NEEDS = "Planned, not measured:"
MIXTRAL = "mixtral-8x7b"


def make_stand_ins() -> None:
    """Make the models, without weights, and the data that the commands name, in the current directory."""
    import transformers as hf

    from examples.common import tiny

    random.seed(0)
    words = tiny.tokenizer(tiny.sentences(200), extra=["<image>"])
    llama = {"vocab_size": 128256, "max_position_embeddings": 131072, "num_key_value_heads": 8, "dtype": "bfloat16"}
    for name, hidden, intermediate, layers, heads in (
        ("meta-llama/Llama-3.1-8B", 4096, 14336, 32, 32),
        ("meta-llama/Llama-3.1-70B", 8192, 28672, 80, 64),
    ):
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        config = hf.LlamaConfig(**llama, **sizes, num_attention_heads=heads, architectures=["LlamaForCausalLM"])
        config.save_pretrained(name)
        words.save_pretrained(name)
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
    tiny.captions(pathlib.Path("pictures"), 8)
    (pathlib.Path("pictures") / "captions.jsonl").rename("pictures/my.jsonl")
    tiny.write_jsonl(pathlib.Path("my.jsonl"), tiny.chats(400))
    for part in ("train", "val"):
        tiny.image_folder(pathlib.Path("images") / part, 20)
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = (" ".join("".join(random.choices(letters, k=7)) for _ in range(10)) for _ in range(12_000))
    pathlib.Path("corpus.txt").write_text("\n\n".join(lines))


def planned(recipe: str, arguments: str) -> Plan:
    """Plan a recipe's command."""
    given = shlex.split(arguments.replace("\\\n", " "))
    if recipe == "finetune_vlm":
        given = [word.replace("my.jsonl", "pictures/my.jsonl") for word in given]
    if recipe == "moe":  # which experts run depends on the data: listed numbers
        return plan(MIXTRAL, 4 * 2048, precision="bf16-mixed", machine="h200", window=1)
    run = fit_config.find(["--config", str(ROOT / "examples" / recipe / "config.yaml"), *given])
    options = run.options | {"window": 1 if run.options["window"] == "auto" else run.options["window"]}
    return plan(
        run.spec.model,
        run.spec.batch,
        precision=run.precision,
        copies=run.copies,
        trained_copies=run.trained_copies,
        machine="h200",
        name=recipe,
        **options,
    )


def sentence(found: Plan) -> str:
    """Say what a plan needs."""
    device, host = format_bytes(found.device_nbytes), format_bytes(found.host.total)
    if found.counted == "tokens":
        why = "Its device memory depends on the data, which chooses experts."
        return f"{NEEDS} by listed numbers this needs {host} of RAM. {why}"
    return f"{NEEDS} this needs {device} of device memory and {host} of RAM (`python docs/make_needs.py`)."


def commands(page: str) -> Iterator[re.Match[str]]:
    """Yield the recipes' commands for real models, each with the paragraph below it."""
    yield from (match for match in COMMAND.finditer(page) if match[1] in RECIPES)


def written(page: str, sentences: dict[str, str]) -> str:
    """Return the page with these sentences below the recipes' commands."""

    def replaced(match: re.Match[str]) -> str:
        recipe, _, below = match.groups()
        if recipe not in sentences:
            return match[0]
        before = match[0].removesuffix(f"{below}\n\n")
        rest = "" if below.startswith(NEEDS) else f"{below}\n\n"
        return f"{before}{sentences[recipe]}\n\n{rest}"

    return COMMAND.sub(replaced, page)


def needs(page: str) -> dict[str, str]:
    """Plan all commands of the page."""
    with tempfile.TemporaryDirectory() as folder, _in(folder):
        make_stand_ins()
        return {match[1]: sentence(planned(match[1], match[2])) for match in commands(page)}


@contextlib.contextmanager
def _in(folder: str) -> Iterator[None]:
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

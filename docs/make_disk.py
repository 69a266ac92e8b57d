"""Write below each plan's command in disk.md what it prints.

    python docs/make_disk.py

The models' sizes are published; their tokenizers and the data are stand-ins, which change only how many steps there
are.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "disk.md"
PRINTED = re.compile(r"(?<=```text\n)(python -m sp_lightning (plan (?:.*\\\n)*.*))\n\n(?:[^`]*\n)?(?=```)")


def make_stand_ins() -> None:
    """Make the models, without weights, and the data that the commands name, in the current directory."""
    from transformers import LlamaConfig

    from examples.common import tiny

    words = tiny.tokenizer()
    for name, hidden, intermediate, layers, heads in (
        ("meta-llama/Llama-3.1-8B", 4096, 14336, 32, 32),
        ("meta-llama/Llama-3.1-70B", 8192, 28672, 80, 64),
    ):
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256}
        config = LlamaConfig(**sizes, max_position_embeddings=131072, dtype="bfloat16", tie_word_embeddings=False)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(name)
        words.save_pretrained(name)
    lines = (tiny.DATA / "chats.jsonl").read_text().splitlines()
    pathlib.Path("my.jsonl").write_text("\n".join(lines * 125))
    pathlib.Path("examples").symlink_to(ROOT / "examples")


def printed(arguments: str) -> str:
    """Return what the command line prints for these arguments, without spaces at the ends of lines."""
    command = [sys.executable, "-m", "sp_lightning", *shlex.split(arguments.replace("\\\n", " "))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    return "\n".join(line.rstrip() for line in said.strip().splitlines())


def written(page: str, outputs: dict[str, str]) -> str:
    """Return the page with these outputs below the commands."""
    return PRINTED.sub(lambda match: f"{match[1]}\n\n{outputs[match[2]]}\n", page)


def outputs(page: str) -> dict[str, str]:
    """Plan all commands of the page."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            make_stand_ins()
            return {match[2]: printed(match[2]) for match in PRINTED.finditer(page)}
        finally:
            os.chdir(before)


def main() -> None:
    """Write the outputs into the page."""
    page = PAGE.read_text()
    PAGE.write_text(written(page, outputs(page)))


if __name__ == "__main__":
    main()

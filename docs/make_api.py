"""Write docs/api.md from the docstrings of the public names: ``python docs/make_api.py``."""

from __future__ import annotations

import inspect
import json
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import sp_lightning
import sp_lightning.hf
from sp_lightning import errors

PAGE = pathlib.Path(__file__).with_name("api.md")
HEAD = """# Reference

What `sp_lightning` makes public, from its docstrings: `python docs/make_api.py` writes this page. Everything else may
change.
`sp_lightning.pytorch_lightning` has the same strategies and the same callback for `pytorch_lightning`;
`sp_lightning.ray.RaySuperpipelineStrategy` is the strategy for [Ray Train](several-devices.md#ray-train).
"""
MADE_FOR_YOU = ("sp_lightning.Handle", "sp_lightning.Plan")  # by `stream` and `plan`
OF_LIGHTNING = ("SuperpipelineStrategy", "SuperpipelineFabricStrategy", "SuperpipelineCallback")  # whose hooks it calls


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    for name in sp_lightning.__all__:
        parts += described(f"sp_lightning.{name}", getattr(sp_lightning, name))
    for name in sp_lightning.hf.__all__:
        parts += described(f"sp_lightning.hf.{name}", getattr(sp_lightning.hf, name))
    parts.append("## sp_lightning.errors\n")
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and kind.__module__ == errors.__name__:
            bases = ", ".join(base.__name__ for base in kind.__bases__)
            parts.append(f"- **`{name}({bases})`**: {first_paragraph(kind)}")
    return "\n".join(parts) + "\n"


def described(name: str, public: Any) -> Iterator[str]:
    """Describe a function, or a class with its public methods."""
    yield f"## {name}\n"
    if name not in MADE_FOR_YOU:
        yield f"```text\n{name}{signature(public)}\n```\n"
    yield sections(inspect.getdoc(public) or "")
    if inspect.isclass(public) and public.__name__ not in OF_LIGHTNING:
        for member, value in vars(public).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                call = f"{member}{signature(value)}" if inspect.isfunction(value) else member
                yield f"- **`{call}`**: {first_paragraph(value)}"
        yield ""


def signature(public: Any) -> str:
    """Return a signature, one argument a line if it is long."""
    parameters = [p for name, p in inspect.signature(public).parameters.items() if name != "self"]
    arguments = [argument(parameter) for parameter in parameters]
    line = f"({', '.join(arguments)})"
    return line if len(line) < 80 else "(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"


def argument(parameter: inspect.Parameter) -> str:
    """Return an argument as it is written in Python, with its type's short name."""
    of = parameter.annotation if isinstance(parameter.annotation, str) else parameter.annotation.__name__
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else f" = {json.dumps(parameter.default, default=str)}"
    default = default.replace("null", "None").replace("true", "True").replace("false", "False")
    return f"{stars}{parameter.name}: {of}{default}"


def first_paragraph(public: Any) -> str:
    return marked((inspect.getdoc(public) or "").split("\n\n")[0].replace("\n", " "))


def sections(text: str) -> str:
    """Turn a docstring's arguments into a list, and its table into one of Markdown."""
    text, found, arguments = text.partition("\nArgs:\n")
    text = re.sub(r"^====.*\n([\s\S]*)\n====.*$", tabled, text, flags=re.MULTILINE)
    if not found:
        return marked(text) + "\n"
    entries = re.split(r"\n(?=\S)", textwrap.dedent(arguments))
    return marked(text) + "\n" + "\n".join(listed(" ".join(entry.split())) for entry in entries) + "\n"


def tabled(table: re.Match[str]) -> str:
    """Turn a table of names and meanings; two spaces or more separate them, and an indented line continues one."""
    lines = re.sub(r"\n +", "  ", table[1]).splitlines()
    rows = [re.sub("  +", " | ", line, count=1) for line in lines]
    return "\n".join(["| name | meaning |", "| --- | --- |", *(f"| {row} |" for row in rows)])


def listed(entry: str) -> str:
    name, said = entry.split(": ", 1)
    return f"- **`{name}`**: {marked(said)}"


def marked(text: str) -> str:
    """Turn reST's literals into Markdown's, outside of text blocks."""
    parts = re.split(r"(```[\s\S]*?```)", text)
    return "".join(part if part.startswith("```") else re.sub(r"``(.+?)``", r"`\1`", part) for part in parts)


if __name__ == "__main__":
    PAGE.write_text(page())

"""Reading what users bring, and writing so that what was there before stays whole until the new is."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import BadInput


def existing(path: str | Path, what: str) -> Path:
    """The path, if something is there."""
    path = Path(path)
    if not path.exists():
        raise BadInput(f"{what} {path} does not exist (looked from {Path.cwd()})")
    return path


def read_jsonl(path: str | Path, what: str = "the data file") -> list[tuple[str, dict[str, Any]]]:
    """Each record with the place that an error about it can name; empty lines are passed over."""
    records = []
    with existing(path, what).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise BadInput(
                    f"{where} is not JSON: {error.msg} at column {error.colno}; nothing was trained"
                ) from None
            if not isinstance(record, dict):
                raise BadInput(f"{where} is a JSON {type(record).__name__}, not an object; nothing was trained")
            records.append((where, record))
    if not records:
        raise BadInput(f"{path} holds no records")
    return records


def read_image(path: str) -> Any:
    """The image, or an error that names its file."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise BadInput(f"{path} is not an image that can be read: {error}") from None


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write a file or a folder under; it takes the place of ``path`` once that went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part, before = (path.with_name(f"{path.name}.{os.getpid()}.{end}") for end in ("part", "before"))
    try:
        yield part
        if path.is_dir():
            path.rename(before)  # a folder can not replace another
        part.replace(path)
    finally:
        if before.exists() and not path.exists():
            before.rename(path)
        for leftover in (part, before):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink(missing_ok=True)

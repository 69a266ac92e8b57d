"""Reading what users bring, and writing so that what was there before stays whole until the new is."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import BadInput

BOM = b"\xef\xbb\xbf"  # with which some editors begin a file


def existing(path: str | Path, what: str) -> Path:
    """The path, if something is there."""
    path = Path(path)
    if not path.exists():
        raise BadInput(f"{what} {path} does not exist (looked from {Path.cwd()})")
    return path


def read_jsonl(path: str | Path, what: str = "the data file") -> list[tuple[str, dict[str, Any]]]:
    """Each record with the place that an error about it can name; empty lines are passed over."""
    path = existing(path, what)
    if path.is_dir():
        raise BadInput(f"{what} {path} is a folder, not a file")
    with path.open("rb") as lines:
        found = ((f"{path}, line {number}", line) for number, line in enumerate(lines, start=1))
        records = [(where, read_record(line, where)) for where, line in found if line.strip(b" \t\r\n" + BOM)]
    if not records:
        raise BadInput(f"{path} holds no records")
    return records


def read_record(line: bytes, where: str) -> dict[str, Any]:
    """A line's object, or an error that says where the line is and what is wrong with it."""
    try:
        record = json.loads(line.removeprefix(BOM).decode())
        if b"\\u" in line:  # which can write what no text may hold
            json.dumps(record, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = f"is not JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: byte {error.start + 1} is {line[error.start]:#04x}"
    except UnicodeEncodeError as error:
        reason = f"holds half of a character: {error.object[error.start : error.end]!a}"
    except RecursionError:
        reason = "is nested too deeply"
    else:
        if isinstance(record, dict):
            return record
        reason = f"is a JSON {type(record).__name__}, not an object"
    raise BadInput(f"{where} {reason}; nothing was trained")


def read_image(path: str) -> Any:
    """The image, or an error that names its file."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if image.mode in ("I", "F") or image.mode.startswith("I;"):
                raise BadInput("it has more than 8 bits a channel, of which those beyond would be cut; convert it")
            return ImageOps.exif_transpose(image).convert("RGB")  # as it was held
    except Exception as error:  # a decoder may raise anything over bytes that are none of its own
        raise BadInput(f"{path} is not an image that can be read: {error}") from None


def stamp(path: Path) -> list[int]:
    """What tells a file from another of the same name."""
    found = path.lstat()  # a link may lead nowhere
    return [found.st_size, found.st_mtime_ns]


def stamps(checkpoint: str | None) -> list[Any]:
    """A checkpoint's name, and what tells the files of its folder, if it is one, from others of the same names."""
    folder = Path(checkpoint or "").expanduser()
    parts = {".safetensors", ".bin", ".json"}  # not what a run may write beside them
    files = sorted(folder.iterdir()) if checkpoint and folder.is_dir() else []
    return [checkpoint, [[file.name, *stamp(file)] for file in files if file.suffix in parts]]


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

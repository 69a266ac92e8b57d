"""A model and a batch for it, from a command line: a config, a name, or one of the user's functions.

No weights are downloaded or read: a config is enough to describe a model.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import OptionError
from ..hf.hub import why_not_there
from ..plan import listed

SPECS = (
    "a transformers config.json or a directory with one, a name on the hub, a torchvision name such as vit_h_14, "
    f"package.module:function, or one of {', '.join(listed.LISTED)}"
)
LENGTH = 2048  # default tokens in a row
IMAGE = 224  # height and width of an image if the config has none


@dataclass(frozen=True)
class Spec:
    """A model and a batch to plan for."""

    name: str
    model: Callable[[], nn.Module]
    batch: Any
    loss: Callable[[nn.Module, Any], Any] | None = None
    note: str = ""
    tokens: int | None = None  # in a row; None where a row is no text


def find(text: str, rows: int, length: int | None = None, data: str | None = None) -> Spec:
    """Find the model that a text names, one of `SPECS`, and make a batch for it.

    Args:
        text: The model.
        rows: Rows of the batch.
        length: Tokens in a row; None: 2048.
        data: ``package.module:function``: a function of rows and length that returns the batch.
    """
    spec = _found(text, rows, length, data is None)
    if data is None:
        return spec
    batch = own_function("data", data)(rows, length or spec.tokens or LENGTH)
    return Spec(spec.name, spec.model, batch, spec.loss, tokens=length or spec.tokens)


def own_function(argument: str, text: str) -> Any:
    """Import a function of the user's, by package.module:function."""
    package, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        allowed = f"package.module:function that can be imported ({error})"
        raise OptionError(argument=argument, found=text, allowed=allowed) from error
    if not callable(found):
        raise OptionError(argument=argument, found=text, allowed=f"a function, not a {type(found).__name__}")
    return found


def _found(text: str, rows: int, length: int | None, makes_batch: bool) -> Spec:
    path, known = Path(text), listed.find(text)
    if known is not None:
        batch = listed.batch_of(known, rows, length) if makes_batch else None
        tokens = batch["input_ids"].shape[1] if batch and "input_ids" in batch else None
        return Spec(listed.SAME.get(text, text), listed.maker(known), batch, tokens=tokens)
    if path.is_dir() or path.suffix == ".json":
        return _of_config(path / "config.json" if path.is_dir() else path, rows, length, makes_batch)
    if "/" in text and ":" not in text:
        return _of_config(_on_hub(text), rows, length, makes_batch, name=text)
    if text.startswith("torchvision:") or (":" not in text and text.lower() in _classifiers()):
        if length is not None and makes_batch:
            raise OptionError(argument="seq", found=length, allowed=f"left out for {text}, which takes images")
        return _of_torchvision(text.removeprefix("torchvision:"), rows)
    if ":" in text:
        if makes_batch:
            allowed = "package.module:function that returns the batch, for a model that is given as a function"
            raise OptionError(argument="data", found=None, allowed=allowed)
        return Spec(text, own_function("model", text), None, tokens=length)
    raise OptionError(argument="model", found=text, allowed=SPECS + listed.near(text))


# ---- transformers


def _on_hub(name: str) -> Path:
    """Return the config.json of a name on the hub: from the cache, or else from the network."""
    utils = _needed("transformers.utils")
    reason, cause = why_not_there(name), None
    if not reason:
        try:
            return Path(utils.cached_file(name, "config.json"))
        except OSError as error:
            reason, cause = str(error).strip().splitlines()[0], error
    allowed = (
        "a directory with a config.json, or a name on the hub whose config.json is cached or can be fetched "
        f"({reason}); without a network, give a directory or a known name"
    )
    raise OptionError(argument="model", found=name, allowed=allowed) from cause


def _of_config(path: Path, rows: int, length: int | None, makes_batch: bool, name: str | None = None) -> Spec:
    transformers = _needed("transformers")
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        allowed = f"a readable config.json of transformers ({error})"
        raise OptionError(argument="model", found=str(path), allowed=allowed) from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in transformers.CONFIG_MAPPING:
        allowed = "a config.json with a model_type that transformers knows"
        raise OptionError(argument="model", found=f"{path} with model_type {kind!r}", allowed=allowed)
    config = transformers.AutoConfig.for_model(**values)
    config.use_cache = False
    made = _class_of(transformers, config)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # any value will do
    make = functools.partial(made._from_config, config, dtype=torch.float32)
    name = name or (path.parent.name if path.name == "config.json" else path.stem)
    if not makes_batch:
        return Spec(name, make, None, tokens=length)
    batch, note = _batch_of(config, made, rows, length)
    return Spec(name, make, batch, note=note, tokens=batch["input_ids"].shape[1] if "input_ids" in batch else None)


def _class_of(transformers: Any, config: Any) -> Any:
    """Return the class that the config names, or else one with a head to train."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    heads = (
        *("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText"),
        *("AutoModelForImageClassification", "AutoModel"),
    )
    whole = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq") if config.is_encoder_decoder else ()
    for head in (*whole, *heads):  # a decoder alone can be a causal model, too
        mapping = getattr(transformers, head)._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    allowed = "a config of a model that transformers can make"
    raise OptionError(argument="model", found=type(config).__name__, allowed=allowed)


def _batch_of(config: Any, made: Any, rows: int, length: int | None) -> tuple[Any, str]:
    name, reads = made.__name__, made.main_input_name
    vocabulary = getattr(getattr(config, "text_config", config), "vocab_size", None)
    if reads == "pixel_values" and not getattr(config, "num_frames", None):
        if length is not None:
            raise OptionError(argument="seq", found=length, allowed=f"left out for {name}, which takes images")
        size = getattr(config, "image_size", None) or IMAGE
        size = (size, size) if isinstance(size, int) else tuple(size)
        images = torch.zeros(rows, getattr(config, "num_channels", 3), *size)
        labelled = {"labels": torch.zeros(rows, dtype=torch.long)} if "Classification" in name else {}
        return {"pixel_values": images, **labelled}, ""
    if reads != "input_ids" or vocabulary is None:
        allowed = f"package.module:function: batches are only made for texts or images, and {name} takes {reads}"
        raise OptionError(argument="data", found=None, allowed=allowed)
    tokens = torch.ones(rows, length or LENGTH, dtype=torch.long)
    labelled = {"labels": tokens} if any(head in name for head in ("LM", "Generation", "ImageText")) else {}
    note = "without images: only the parts that read text were measured" if hasattr(config, "vision_config") else ""
    return {"input_ids": tokens, **labelled}, note


# ---- torchvision


def _classifiers() -> list[str]:
    if importlib.util.find_spec("torchvision") is None:
        return []
    models = importlib.import_module("torchvision.models")
    return list(models.list_models(module=models))


def _of_torchvision(name: str, rows: int) -> Spec:
    models = _needed("torchvision.models")
    if name.lower() not in _classifiers():
        allowed = f"one of torchvision's classifiers: {', '.join(_classifiers())}"
        raise OptionError(argument="model", found=name, allowed=allowed)
    size = 299 if name == "inception_v3" else IMAGE
    batch = torch.zeros(rows, 3, size, size), torch.zeros(rows, dtype=torch.long)
    return Spec(name, lambda: models.get_model(name, weights=None), batch, _classification)


def _classification(net: nn.Module, batch: Any) -> Any:
    scores = net(batch[0])
    return torch.nn.functional.cross_entropy(getattr(scores, "logits", scores), batch[1])


def _needed(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        top = package.partition(".")[0]
        allowed = f"a model that does not need {top}, which is not installed: pip install 'sp-lightning[models]'"
        raise OptionError(argument="model", found=top, allowed=allowed) from error

"""A model and a batch for it, from a command line: a config, a name, or one of the user's functions.

Nothing is downloaded, and no weights are read: a config is enough to describe a model.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import OptionError
from ..planning.shapes import SHAPES
from ..planning.workloads import WORKLOADS, Workload

SPECS = (
    "a transformers config.json or a directory with one, a torchvision name such as vit_h_14, package.module:function, "
    f"or one of {', '.join(dict.fromkeys([*WORKLOADS, *SHAPES]))}"
)
LENGTH = 2048  # default tokens in a row
IMAGE = 224  # height and width of an image if the config has none
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "depths", "layers_block_type")


@dataclass(frozen=True)
class Spec:
    """A model and a batch to plan for."""

    name: str
    model: Callable[[], nn.Module] | Workload
    batch: Any
    loss: Callable[[nn.Module, Any], Any] | None = None
    note: str = ""


def find(text: str, rows: int, length: int | None = None, data: str | None = None) -> Spec:
    """Find the model that a text names, and make a batch for it.

    Args:
        text: One of `SPECS`.
        rows: Rows of the batch.
        length: Tokens in a row; None: the model's own number, or 2048.
        data: ``package.module:function``: a function of rows and length that returns the batch.
    """
    if data is None and text in SHAPES.keys() - WORKLOADS:
        return _of_shape(text, rows, length)
    length = length or LENGTH
    spec = _found(text, rows, length, data)
    if data is None:
        return spec
    return Spec(spec.name, spec.model, _function("data", data)(rows, length), spec.loss)


def _of_shape(name: str, rows: int, length: int | None) -> Spec:
    shape = SHAPES[name]
    for library in shape.needs:
        _needed(library)
    length = length or shape.seq
    shape.check(length)
    return Spec(name, shape.make, shape.inputs(rows, length, torch.Generator()))


def _found(text: str, rows: int, length: int, data: str | None) -> Spec:
    path = Path(text)
    if text in WORKLOADS:
        return Spec(text, WORKLOADS[text], rows * length)
    if text in SHAPES:
        return Spec(text, SHAPES[text].make, None)
    if path.is_dir() or path.suffix == ".json":
        return _of_config(path / "config.json" if path.is_dir() else path, rows, length, data)
    if text.startswith("torchvision:") or (":" not in text and _is_torchvision(text)):
        return _of_torchvision(text.removeprefix("torchvision:"), rows)
    if ":" in text:
        if data is None:
            allowed = "package.module:function that returns the batch, for a model that is given as a function"
            raise OptionError(argument="data", found=None, allowed=allowed)
        return Spec(text, _function("model", text), None)
    raise OptionError(argument="model", found=text, allowed=SPECS)


def _function(argument: str, text: str) -> Any:
    package, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        allowed = f"package.module:function that can be imported ({error})"
        raise OptionError(argument=argument, found=text, allowed=allowed) from error
    if not callable(found):
        raise OptionError(argument=argument, found=text, allowed=f"a function, not a {type(found).__name__}")
    return found


# ---- transformers


def _of_config(path: Path, rows: int, length: int, data: str | None) -> Spec:
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
    if not _layers(config):
        allowed = f"a config with layers ({', '.join(LAYERS[:3])}): a model without layers has nothing to stream"
        raise OptionError(argument="model", found=str(path), allowed=allowed)
    name = path.parent.name if path.name == "config.json" else path.stem
    made = _class_of(transformers, config)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # any value will do

    def make() -> Any:
        config.use_cache = False
        return made._from_config(config, dtype=torch.float32)

    return Spec(name, make, *(_batch_of(config, made, rows, length) if data is None else (None,)))


def _layers(config: Any) -> bool:
    parts = [config, *(getattr(config, name, None) for name in ("text_config", "vision_config", "decoder", "encoder"))]
    found = (getattr(part, name, None) for part in parts if part is not None for name in LAYERS)
    return any(found)


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


def _batch_of(config: Any, made: Any, rows: int, length: int) -> tuple[Any, None, str]:
    name, reads = made.__name__, made.main_input_name
    vocabulary = getattr(getattr(config, "text_config", config), "vocab_size", None)
    if reads == "pixel_values" and not getattr(config, "num_frames", None):
        size = getattr(config, "image_size", None) or IMAGE
        size = (size, size) if isinstance(size, int) else tuple(size)
        images = torch.zeros(rows, getattr(config, "num_channels", 3), *size)
        labelled = {"labels": torch.zeros(rows, dtype=torch.long)} if "Classification" in name else {}
        return {"pixel_values": images, **labelled}, None, ""
    if reads != "input_ids" or vocabulary is None:
        allowed = f"package.module:function: batches are only made for texts or images, and {name} takes {reads}"
        raise OptionError(argument="data", found=None, allowed=allowed)
    tokens = torch.ones(rows, length, dtype=torch.long)
    labelled = {"labels": tokens} if any(head in name for head in ("LM", "Generation", "ImageText")) else {}
    note = "without images: only the parts that read text were measured" if hasattr(config, "vision_config") else ""
    return {"input_ids": tokens, **labelled}, None, note


# ---- torchvision


def _is_torchvision(name: str) -> bool:
    if importlib.util.find_spec("torchvision") is None:
        return False
    return name.lower() in _classifiers()


def _classifiers() -> list[str]:
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

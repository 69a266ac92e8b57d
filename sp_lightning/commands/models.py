"""A model and a batch for it, from ``--model``: a listed name, a name on the hub, a config.json or its directory.

No weights are downloaded or read: a config is enough to describe a model.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from ..errors import OptionError
from ..plan import listed
from . import need

ALLOWED = f"a config.json of transformers or its directory, a name on the hub, or one of {', '.join(listed.LISTED)}"
BY_PYTHON = "sp_lightning.plan(make_model, batch) plans others, by Python"
IMAGE = 224  # height and width of an image, if the config has none


def find(text: str | None, rows: int, tokens: int | None) -> dict[str, Any]:
    """Return a model, a batch of as many rows for it, and its name, as arguments of `sp_lightning.plan`."""
    if text is None:
        raise OptionError(argument="model", found=text, allowed=f"given, unless --config is: {ALLOWED}")
    need("transformers", "models", "a plan of a model")
    if text in listed.LISTED:
        return {"module": text, "batch": listed.batch_of(listed.LISTED[text], rows, tokens)}
    if not os.path.exists(text) and ("/" not in text or text.endswith(".json")):
        raise OptionError(argument="model", found=text, allowed=ALLOWED)
    config = _config(text)
    import transformers

    found = [name for name in config.architectures or () if hasattr(transformers, name)]
    if not found:
        allowed = f"a config whose architectures name a class of transformers ({BY_PYTHON})"
        raise OptionError(argument="model", found=text, allowed=allowed)
    config.use_cache = False
    made = getattr(transformers, found[0])
    name = os.path.basename(os.path.normpath(text).removesuffix("/config.json"))
    return {
        "module": functools.partial(made, config),
        "batch": _batch(config, made, rows, tokens),
        "name": f"{name} (its text alone)" if hasattr(config, "vision_config") else name,
    }


def _config(text: str) -> Any:
    """Read a config from a file, a directory, the hub's cache, or else the hub."""
    from transformers import AutoConfig

    from ..hf.hub import why_not_there  # which imports all that a run needs

    reason = why_not_there(text)
    if not reason:
        try:
            return AutoConfig.from_pretrained(text, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
    raise OptionError(argument="model", found=text, allowed=f"{ALLOWED} ({reason})")


def _batch(config: Any, made: Any, rows: int, tokens: int | None) -> dict[str, torch.Tensor]:
    """Make a batch of texts, which are their own labels if the model predicts words, or of images."""
    if made.main_input_name == "pixel_values" and tokens is None:
        size = getattr(config, "image_size", IMAGE)
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros(rows, getattr(config, "num_channels", 3), height, width)}
    if made.main_input_name != "input_ids":
        allowed = f"a model that reads text, or images without --seq ({BY_PYTHON})"
        raise OptionError(argument="model", found=made.__name__, allowed=allowed)
    texts = torch.ones(rows, tokens or listed.TOKENS, dtype=torch.long)
    predicts = any(head in made.__name__ for head in ("LM", "Generation"))
    return {"input_ids": texts} | ({"labels": texts} if predicts else {})

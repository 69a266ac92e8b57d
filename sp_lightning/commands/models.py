"""A model and a batch for it, from ``--model``: a listed name, a name on the hub, a config.json or its directory.

No weights are downloaded or read: a config is enough to describe a model.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from ..errors import OptionError
from ..plan.model import BY_PYTHON, LISTED, batch_of, kind_of, made, made_with_adapters
from . import need

ALLOWED = f"a config.json of transformers or its directory, a name on the hub, or one of {', '.join(LISTED)}"


def find(text: str | None, rows: int, tokens: int | None, adapters: int | None) -> dict[str, Any]:
    """Return the model that ``--model`` names, a batch of so many rows, and its name, as arguments of `plan`."""
    if text is None:
        raise OptionError(argument="model", found=text, allowed=f"given, unless --config is: {ALLOWED}")
    need("transformers", "models", "a plan of a model")
    kind, config = kind_of(text) if text in LISTED else _of_transformers(text)
    name = os.path.basename(os.path.normpath(text).removesuffix("/config.json"))
    make = functools.partial(made, kind, config)
    if adapters is not None:
        need("peft", "recipes", "a plan of adapters")
        make = functools.partial(made_with_adapters, kind, config, adapters)
    return {
        "module": make,
        "batch": batch_of(kind, config, rows, tokens),
        "name": f"{name} (its text alone)" if hasattr(config, "vision_config") else name,
    }


def _of_transformers(text: str) -> tuple[Any, Any]:
    """Return a model's class and configuration by a config.json, its directory, or a name on the hub."""
    is_missing = not os.path.exists(text) and ("/" not in text or text.endswith(".json"))
    if is_missing or (os.path.isdir(text) and not os.path.exists(os.path.join(text, "config.json"))):
        why = "no such file" if is_missing else "it has no config.json"
        raise OptionError(argument="model", found=text, allowed=f"{ALLOWED} ({why})")
    config = _config(text)
    import transformers

    found = [name for name in config.architectures or () if hasattr(transformers, name)]
    if not found:
        allowed = f"a config whose architectures name a class of transformers ({BY_PYTHON})"
        raise OptionError(argument="model", found=text, allowed=allowed)
    config.use_cache = False
    return getattr(transformers, found[0]), config


def _config(text: str) -> Any:
    """Read a model's configuration from a file, a directory, the hub's cache, or else the hub."""
    from transformers import AutoConfig

    from ..hf.hub import why_not_there  # imported late, since the package imports all that a run needs

    reason = why_not_there(text)
    if not reason:
        try:
            return AutoConfig.from_pretrained(text, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
    raise OptionError(argument="model", found=text, allowed=f"{ALLOWED} ({reason})")

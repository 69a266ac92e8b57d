"""Checkpoints: models read into host memory, or made without weights for a plan; and what a run keeps of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sp_lightning.errors import OptionError
from sp_lightning.hf.hub import why_not_there


def planned() -> bool:
    """Whether tensors are made without data here, as for ``python -m sp_lightning plan --config``."""
    made = torch.empty(0)
    return made.is_meta or type(made) is not torch.Tensor


def there(name: str) -> str:
    """Return the name of a checkpoint, unless it can be read neither here nor from the hub."""
    if reason := why_not_there(name):
        allowed = f"a checkpoint's directory, or its name on the hub ({reason})"
        raise OptionError(argument="model.name_or_path", found=name, allowed=allowed)
    return name


def load(auto_class: Any, name: str, dtype: str = "float32", **options: Any) -> Any:
    """Read a model of transformers, with its weights mapped from their files; in a plan, from its config alone."""
    from transformers import AutoConfig

    if not planned():
        with torch.device("cpu"):  # streamed weights begin on the host; a plain run moves them later
            return auto_class.from_pretrained(name, dtype=dtype, **options).train()
    options.pop("ignore_mismatched_sizes", None)
    config = AutoConfig.from_pretrained(name, **options)
    kept = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    return auto_class.from_config(config, dtype=kept).train()


def keep_trained(module: torch.nn.Module, checkpoint: dict[str, Any]) -> None:
    """Leave frozen weights out of a run's checkpoint: they are read from the model's own. For on_save_checkpoint."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read the objects of a file, one a line."""
    try:
        lines = Path(path).expanduser().read_text("utf-8-sig").split("\n")  # splitlines() would split within texts
    except OSError as error:
        raise OptionError(
            argument="data.path", found=str(path), allowed=f"a file of JSON lines ({error.strerror})"
        ) from None
    return [json.loads(line) for line in lines if line.strip()]

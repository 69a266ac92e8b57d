"""Checkpoint directories of transformers: read into host memory, and written so that from_pretrained reads them.

1. ``from_pretrained`` builds the model without memory and maps the shards, one after the other: weights that need no
   conversion stay pages of the files until streaming begins, and are copied once, unit by unit. Nothing passes through
   the device.
2. It is called in ``configure_model``, which the Trainer calls once it knows where weights are to be.
"""

from pathlib import Path
from typing import Any

import lightning as L

from .errors import BadInput
from .files import existing, whole


def found(name_or_path: str, what: str = "the checkpoint directory") -> str:
    """A directory, or a name for the hub. What looks like a path has to be there."""
    path = Path(name_or_path).expanduser()
    looks_like_one = path.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") > 1
    return str(existing(path, what)) if looks_like_one or path.exists() else name_or_path


def load(auto_class: Any, name_or_path: str, dtype: str = "float32", **options: Any) -> Any:
    """The model of a checkpoint, on the host, in training mode."""
    model = auto_class.from_pretrained(found(name_or_path), dtype=dtype, **options)
    return model.train()


def load_tokenizer(name_or_path: str, checkpoint: str) -> Any:
    """A tokenizer whose every token the checkpoint's model has an embedding for."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(found(name_or_path, "the tokenizer's directory"))
    check_tokenizer(tokenizer, AutoConfig.from_pretrained(found(checkpoint)), name_or_path, checkpoint)
    return tokenizer


def check_tokenizer(tokenizer: Any, config: Any, name: str, checkpoint: str) -> None:
    """Refuses one that makes tokens for which the model has no embedding."""
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise BadInput(
            f"the tokenizer of {name} has {len(tokenizer)} tokens, but the model of {checkpoint} embeds {rows}; "
            "use the tokenizer that the model was trained with, or resize the model's embedding first"
        )
    if tokenizer.eos_token_id is None:
        raise BadInput(f"the tokenizer of {name} has no end-of-sequence token, which ends every document")


class Export(L.Callback):
    """Writes the trained model as a plain checkpoint directory when training ends.

    The module has an ``export(folder)`` that writes it. A directory that is there already stays whole until the new
    one is.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with whole(Path(trainer.default_root_dir) / self.folder) as part:
            pl_module.export(part)

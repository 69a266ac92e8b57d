"""Checkpoint directories of transformers: read into host memory, and written so that from_pretrained reads them.

1. ``from_pretrained`` builds the model without memory and maps the shards, one after the other: weights that need no
   conversion stay pages of the files until streaming begins, and are copied once, unit by unit. Nothing passes through
   the device.
2. It is called in ``configure_model``, which the Trainer calls once it knows where weights are to be.
3. Where tensors are made without data (``torch.device("meta")``, FakeTensorMode) a model is made from its config alone:
   a plan needs no weights (``plan --config``).
"""

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from sp_lightning.errors import did_you_mean
from sp_lightning.hf.hub import why_not_there

from .errors import BadInput
from .files import existing, whole


def found(name_or_path: str, what: str = "the checkpoint directory") -> str:
    """A directory, or a name for the hub. What looks like a path has to be there."""
    path = Path(name_or_path).expanduser()
    looks_like_one = path.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") > 1
    return str(existing(path, what)) if looks_like_one or path.exists() else name_or_path


def there(name_or_path: str, what: str = "the checkpoint directory") -> str:
    """A directory, or a name that the hub's cache has or that the hub can be asked for; an error says so at once."""
    place = found(name_or_path, what)
    if Path(place).is_file():
        raise BadInput(f"{what} {name_or_path} is a file, not a folder")
    if reason := why_not_there(place):
        raise BadInput(
            f"{what} {name_or_path} is neither a folder here nor in the hub's cache, and {reason}; give a folder, or "
            f"fetch it where there is a network: hf download {name_or_path}"
        )
    return place


def read(auto_class: Any, name_or_path: str, what: str = "the checkpoint directory", **options: Any) -> Any:
    """What a class of transformers reads from there, or an error that names it."""
    from safetensors import SafetensorError

    place = there(name_or_path, what)
    try:
        return auto_class.from_pretrained(place, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInput(f"{what} {name_or_path} can not be read (looked from {Path.cwd()}): {error}") from error


def load(
    auto_class: Any,
    name_or_path: str,
    dtype: str = "float32",
    new_head: bool = False,
    unused: tuple[str, ...] = (),
    **options: Any,
) -> torch.nn.Module:
    """The model of a checkpoint, on the host, in training mode; with a new head, all but that is the checkpoint's.

    ``unused``: how names of weights begin that may be missing, since nothing looks at what they make.
    """
    if dtype != "auto":
        dtype_of(dtype)
    if planned():
        return from_config(auto_class, name_or_path, dtype, **options).train()
    with torch.device("cpu"):  # wherever a plain strategy wants what is made
        model, info = read(auto_class, name_or_path, dtype=dtype, output_loading_info=True, **options)
    lacking = sorted(name for name in info["missing_keys"] if not name.startswith(unused))
    if lacking and not new_head:
        raise BadInput(
            f"{name_or_path} lacks {len(lacking)} of the weights of {type(model).__name__}, which would begin at "
            f"random: {', '.join(lacking[:3])}{', ...' if len(lacking) > 3 else ''}"
        )
    return model.train()


def with_adapters(model: Any, folder: str) -> Any:
    """A model with the adapters that were trained on it."""
    from peft import PeftConfig, PeftModel, get_peft_model

    place = there(folder, "the directory of adapters")
    if Path(place).is_dir() and not (Path(place) / "adapter_config.json").exists():
        raise BadInput(f"the directory of adapters {folder} has no adapter_config.json, which a run of lora_llm writes")
    try:
        config = PeftConfig.from_pretrained(place)
        return get_peft_model(model, config) if planned() else PeftModel.from_pretrained(model, place)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"the adapters of {folder} can not be put on {type(model).__name__}: {reason}") from error


def adapted(model: Any, config: Any, adapter: str = "default") -> Any:
    """A model with new adapters; each target of their configuration has to be a layer that can have one."""
    from peft import get_peft_model

    targets = config.target_modules
    check_targets(model, [] if isinstance(targets, str) else targets)
    try:
        return get_peft_model(model, config, adapter)
    except ValueError as error:
        raise BadInput(f"the adapters can not be made: {' '.join(str(error).split())}") from error


def check_targets(model: torch.nn.Module, targets: Iterable[str], option: str = "model.targets") -> None:
    """Refuses an option's names of layers that a model has not got: peft leaves them out, if it has any others."""
    named = dict(model.named_modules())
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in named):
            linear = {name.rpartition(".")[2] for name, module in named.items() if isinstance(module, torch.nn.Linear)}
            raise BadInput(
                f"{option} names {target!r}, which {type(model).__name__} has not got; its linear layers are "
                f"{', '.join(sorted(linear))}{did_you_mean(target, linear)}"
            )


def dtype_of(name: str) -> torch.dtype:
    """The type of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"model.dtype={name} is no type of weights: float32, bfloat16, float16 or auto")
    return dtype


def fill(model: torch.nn.Module, state: dict[str, torch.Tensor], where: str | Path) -> None:
    """Give a model all of its weights; one that it uses under several names may be given under one."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    named = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    given = {id(tensor) for name, tensor in named.items() if name in state}
    lacking = [name for name in missing if id(named.get(name)) not in given]
    for names, problem in ((lacking, "lacks"), (unexpected, "has more than")):
        if names:
            raise BadInput(f"{where} {problem} the weights of {type(model).__name__}: {', '.join(names[:3])}, ...")


def planned() -> bool:
    """Return whether a model is made without weights, to plan its run (Rule 3)."""
    made = torch.empty(0)
    return made.is_meta or type(made) is not torch.Tensor  # such as a fake tensor, which has no data either


def from_config(auto_class: Any, name_or_path: str, dtype: str, **options: Any) -> Any:
    """Make a model as it would be read, without its weights."""
    from transformers import AutoConfig, GenerationConfig

    options.pop("ignore_mismatched_sizes", None)
    config = read(AutoConfig, name_or_path, **options)
    own = getattr(config, "dtype", None) or torch.float32
    model = auto_class.from_config(config, dtype=own if dtype == "auto" else getattr(torch, dtype))
    with contextlib.suppress(OSError):  # a checkpoint may have none
        model.generation_config = GenerationConfig.from_pretrained(found(name_or_path))
    return model


def load_config(checkpoint: str) -> Any:
    """What a model's sizes are."""
    from transformers import AutoConfig

    return read(AutoConfig, checkpoint).get_text_config()


def load_tokenizer(name_or_path: str, checkpoint: str, ends: bool = True) -> Any:
    """A tokenizer whose every token the checkpoint's model has an embedding for; ``ends``: one that can end a text."""
    from transformers import AutoTokenizer

    tokenizer = read(AutoTokenizer, name_or_path, "the tokenizer's directory")
    check_tokenizer(tokenizer, load_config(checkpoint), name_or_path, checkpoint, ends)
    return tokenizer


def check_tokenizer(tokenizer: Any, config: Any, name: str, checkpoint: str, ends: bool = True) -> None:
    """Refuses one that makes tokens for which the model has no embedding; special ones that no text holds may be
    more: a tokenizer may serve a family's models with images and those without."""
    rows = config.vocab_size
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    tokens = {*tokenizer.get_vocab().values()}
    if tokens <= special:  # transformers makes an empty one where there is none
        raise BadInput(f"there is no tokenizer in {name}; save the model's there too, with tokenizer.save_pretrained")
    if any(index >= rows and index not in special for index in tokens):
        raise BadInput(
            f"the tokenizer of {name} has {len(tokenizer)} tokens, but the model of {checkpoint} embeds {rows}; "
            "use the tokenizer that the model was trained with, or resize the model's embedding first"
        )
    if ends and tokenizer.eos_token_id is None:
        raise BadInput(f"the tokenizer of {name} has no end-of-sequence token, which ends every document")


def positions(config: Any) -> float:
    """How many a model has; one without a table of them, or a limit, takes any."""
    most = getattr(config, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else math.inf


def check_length(length: int, config: Any, checkpoint: str) -> None:
    """Refuses rows that are longer than the model has positions."""
    most = positions(config)
    if length < 2:
        raise BadInput(f"data.block_size={length}: of fewer than 2 tokens nothing can be predicted")
    if length > most:
        raise BadInput(
            f"data.block_size={length} is more than the {most} positions of the model of {checkpoint}; set it to "
            f"{most} or less"
        )


def keep_trained(module: torch.nn.Module, checkpoint: dict[str, Any]) -> None:
    """Leave out of a checkpoint what is not trained: it is read from its own. For ``on_save_checkpoint``."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for key in {"state_dict", "current_model_state"} & checkpoint.keys():
        checkpoint[key] = {name: value for name, value in checkpoint[key].items() if name in trained}


class Export(L.Callback):
    """Writes the trained model as a plain checkpoint directory when training ends.

    The module has an ``export(folder)`` that writes it. A directory that is there already stays whole until the new
    one is.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            with whole(Path(trainer.default_root_dir) / self.folder) as part:
                pl_module.export(part)

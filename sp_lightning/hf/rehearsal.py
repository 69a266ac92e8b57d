"""Run a script up to its first training step, on weights without data, to find what a plan of it needs.

1. Parameters are meta tensors from the moment when a module gets them, so no weight is made or read:
   ``from_pretrained`` makes the model of its config. Of data the first rows are read: ``datasets.load_dataset`` reads
   `ROWS` of them, and ``map`` and ``filter`` see no more.
2. The script ends where it would train: in transformers' ``Trainer.train``, of which the first batch and
   ``compute_loss`` are planned, or else in the first call, with gradients, of a model that trains and was moved or
   prepared. That call is planned, and what the script computes from its result is not.
3. All models that the script moves to the device stream, so all are planned, each with a window of its own. A model
   that only ran before the first step takes host memory, and no time.
4. Numbers that code around the models reads from results, for its log, are unknown, and taken as one.
5. The script needs no device: mixed precision is noted, and not asked of accelerate.
6. A Trainer whose batches are rows of its data makes the real ones as it trains: it generates answers, and has them
   scored. That is planned with the step (answers.py, Rule 2), and reward functions are called with answers of tokens
   that are made up. A batch's share of it is as large as the batch is of all that are made at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..compat.tensors import consists_of_tensors
from ..errors import OptionError, UnsupportedError
from ..runtime.entries import has_method
from ..tracing.answers import Generated, begins
from ..tracing.dry_run import Together
from ..tracing.fake_tensors import unknown_numbers_are_one
from .patched import function, names_of_accelerate, replace
from .quantised import quantise

ROWS = 256  # of each data set (Rule 1)
MIXED = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
TRUE = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}


class Rehearsed(Together):
    """The models of a script, of which the first one trains (Rule 3)."""

    def __init__(self, student: nn.Module, others: list[nn.Module]) -> None:
        super().__init__(student, *others)
        for module in self.modules():  # whose values are not needed
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to("meta")
        # Descriptions: another reference to a weight's bytes would have each pass fetch it anew.
        plain = (p for p in self.parameters() if not consists_of_tensors(p))
        self._weights = [(p, (p.shape, p.stride(), p.dtype)) for p in plain]
        self._own_buffers = [(module, dict(module._buffers)) for module in self.modules()]

    @property
    def student(self) -> nn.Module:
        return self.models[0]

    @property
    def others(self) -> list[nn.Module]:
        return [*self.models[1:]]

    def renewed(self) -> nn.Module:
        """Return what is planned, with weights and buffers as the script made them, after a plan converted them."""
        for parameter, (shape, stride, dtype) in self._weights:
            parameter.data = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            parameter.grad = None
        for module, buffers in self._own_buffers:
            module._buffers.update(buffers)
        return self if self.others else self.student

    def train(self, mode: bool = True) -> Rehearsed:
        """Set the mode of the model that trains alone."""
        self.student.train(mode)
        return self


@dataclass
class FirstStep:
    """The first training step of a script."""

    models: Rehearsed
    batch: Any
    loss: Callable[[nn.Module, Any], Any]
    precision: str
    optimizer: Callable[[Any], Any] | None
    accumulate: int
    steps: int | None  # of the whole run; None if they are unknown
    notes: list[str] = field(default_factory=list)
    clip: bool = False  # whether gradients are clipped, where a Trainer says so

    @property
    def name(self) -> str:
        return type(self.models.student).__name__

    @property
    def tokens(self) -> int | None:
        """The tokens of a row; None where a row is no text."""
        found = self.batch.get("input_ids") if isinstance(self.batch, dict) else None
        return int(found.shape[1]) if isinstance(found, Tensor) and found.dim() == 2 else None


class _Reached(BaseException):
    """The script came to its first training step (Rule 2)."""


class rehearsal:
    """Run a script's code up to its first training step, which is ``found`` then.

    Args:
        tokens: Tokens of a row, in place of as many as the first rows have.
    """

    def __init__(self, tokens: int | None = None) -> None:
        self.found: FirstStep | None = None
        self._tokens = tokens
        self._models: list[nn.Module] = []  # that were moved or prepared
        self._accelerator: Any = None
        self._mixed = ""  # what was asked of accelerate
        self._optimizer: Any = None
        self._is_cut = False  # whether a data set has more rows than were read
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> rehearsal:
        names = names_of_accelerate("the plan of a script")
        self._names = names
        replacements = {
            names.REGISTER_PARAMETER: self._register_parameter,
            names.MODULE_TO: self._to,
            names.MODULE_CUDA: self._cuda,
            names.ACCELERATOR: self._make_accelerator,
            names.PREPARE_MODEL: self._prepare_model,
            names.PREPARE_OPTIMIZER: self._prepare_optimizer,
        }
        makers = {**names.of_trainers(), **names.of_data_sets()}  # before any patch: they may raise an error
        for patch, replacement in replacements.items():
            replace(self._undo, patch, function(patch.original, replacement))
        for patch, method in makers.items():
            replace(self._undo, patch, getattr(self, method)(patch))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self._undo.close()
        if isinstance(error, RuntimeError) and "meta tensor" in str(error):
            raise UnsupportedError(
                "the script saves weights or reads their values before it trains, or results that depend on them, and "
                "a plan of it has none: let it save the model in a run of its own, and leave out what depends on "
                "values, such as precompute_ref_log_probs"
            ) from error
        return isinstance(error, _Reached) or (isinstance(error, SystemExit) and not error.code)

    # ---- weights (Rule 1)

    def _register_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        self._names.REGISTER_PARAMETER.original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            with torch.no_grad():
                empty = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            vars(empty).update(vars(parameter))
            module._parameters[name] = empty

    def _from_pretrained(self, _: Any) -> Any:
        def from_pretrained(cls: Any, /, name: Any = None, *args: Any, config: Any = None, **kwargs: Any) -> Any:
            if config is None or isinstance(config, str | os.PathLike):
                of_config = functools.partial(cls.config_class.from_pretrained, return_unused_kwargs=True)
                config, _ = of_config(config or name, **kwargs)
            dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
            dtype = (config.dtype or torch.float32) if dtype in (None, "auto") else dtype
            dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
            kept = {key: kwargs[key] for key in ("attn_implementation",) if kwargs.get(key) is not None}
            packing = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
            model = cls._from_config(config, dtype=dtype, **kept)
            if packing:
                quantise(model, packing)
            model.name_or_path = model.config.name_or_path = str(name)
            return model.eval()

        return classmethod(from_pretrained)

    def _has_bf16(self, _: Any) -> Any:
        return lambda: True  # Rule 5

    # ---- data (Rule 1)

    def _load_dataset(self, patch: Any) -> Any:
        original = patch.original

        @functools.wraps(original)
        def load_dataset(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(*args, **kwargs)
            if given.arguments.get("streaming"):
                return original(*args, **kwargs)
            given.arguments.pop("num_proc", None)
            try:
                found = original(*given.args, **(given.kwargs | {"streaming": True}))
            except (ValueError, NotImplementedError):  # a split in parts, a format without streaming
                return original(*args, **kwargs)
            kind = self._names.data_set_kinds()
            if isinstance(found, dict):
                return kind.DatasetDict({name: self._first_rows(rows) for name, rows in found.items()})
            return self._first_rows(found)

        return load_dataset

    def _first_rows(self, stream: Any) -> Any:
        rows = list(stream.take(ROWS + 1))
        self._is_cut = self._is_cut or len(rows) > ROWS
        return self._names.data_set_kinds().Dataset.from_list(rows[:ROWS], features=stream.features)

    def _cut(self, patch: Any) -> Any:
        original = patch.original

        @functools.wraps(original)
        def method(rows: Any, *args: Any, **kwargs: Any) -> Any:
            if len(rows) > ROWS:
                self._is_cut, rows = True, rows.select(range(ROWS))
            return original(rows, *args, **kwargs)

        return method

    # ---- models (Rule 3)

    def _to(self, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        to = self._names.MODULE_TO.original
        if not any(parameter.is_meta for parameter in module.parameters()):
            return to(module, *args, **kwargs)  # type: ignore[no-any-return]
        device, dtype, _, _ = self._names.parse_to(*args, **kwargs)
        if dtype is not None:
            to(module, dtype)
        if device is not None:
            self._notice(module)
        return module

    def _cuda(self, module: nn.Module, device: Any = None) -> nn.Module:
        return self._to(module, torch.device("cuda"))

    def _notice(self, module: nn.Module) -> None:
        if not any(module is part for model in self._models for part in model.modules()):
            self._models.append(module)
            self._undo.callback(module.register_forward_pre_hook(self._call, with_kwargs=True).remove)

    def _make_accelerator(self, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        make = self._names.ACCELERATOR.original
        given = inspect.signature(make).bind(accelerator, *args, **kwargs)
        asked = given.arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        self._mixed = str(asked)
        given.arguments["mixed_precision"] = "no"  # Rule 5
        make(*given.args, **given.kwargs)

    def _prepare_model(
        self, accelerator: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        self._accelerator = accelerator
        self._notice(model)
        if evaluation_mode:
            model.requires_grad_(False)  # it has no gradients
        return self._names.PREPARE_MODEL.original(accelerator, model, device_placement=False, evaluation_mode=True)

    def _prepare_optimizer(self, accelerator: Any, optimizer: Any, device_placement: Any = None) -> Any:
        self._optimizer = self._optimizer or optimizer
        return self._names.PREPARE_OPTIMIZER.original(accelerator, optimizer, False)

    # ---- the first step (Rule 2)

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = apply_to_collection((args, kwargs), Tensor, _without_data)
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if self.found is not None or not (trains and torch.is_grad_enabled()):
            return args, kwargs
        self.found = FirstStep(
            models=self._all_models(module),
            batch=self._sized(dict(kwargs)) if not args else (args, kwargs),
            loss=lambda _, batch: module(**batch) if isinstance(batch, dict) else module(*batch[0], **batch[1]),
            precision=self._precision(module),
            optimizer=_maker(getattr(self._optimizer, "optimizer", self._optimizer)),
            accumulate=getattr(self._accelerator, "gradient_accumulation_steps", 1),
            steps=None,
            notes=[f"the first call of {type(module).__name__} was measured, not what the script computes from it"],
        )
        raise _Reached

    def _train(self, _: Any) -> Any:
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            given = trainer.args
            if trainer.model_init is not None:
                trainer.model = trainer.call_model_init()
            model = trainer.model
            if getattr(given, "activation_checkpointing", False) or getattr(given, "gradient_checkpointing", False):
                for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
                    if hasattr(model, name):
                        getattr(model, name)()
                        break
            loader = trainer.get_train_dataloader()
            batch: Any = next(iter(loader))
            prepare: Callable[[Any], Any]
            notes: list[str]
            self._optimizer, models = trainer.create_optimizer(), self._all_models(model)
            prepare, notes = dict, []
            if not isinstance(batch, Mapping) or not any(isinstance(value, Tensor) for value in batch.values()):
                batch, prepare = self._made_later(trainer, batch)
                notes.append("how long answers are: all are taken to be as long as they may be")
            if given.eval_strategy != "no" and given.per_device_eval_batch_size > given.per_device_train_batch_size:
                notes.append(f"evaluation, whose batches have {given.per_device_eval_batch_size} rows")
            self.found = FirstStep(
                models=models,
                batch=self._sized(apply_to_collection(dict(batch), Tensor, lambda tensor: tensor.cpu())),
                loss=functools.partial(_loss_of_trainer, trainer, models, prepare),
                precision=self._precision(model),
                optimizer=_maker(self._optimizer),
                accumulate=given.gradient_accumulation_steps,
                steps=self._steps(given, loader),
                notes=notes,
                clip=bool(given.max_grad_norm),
            )
            raise _Reached

        return train

    def _made_later(self, trainer: Any, rows: Any) -> tuple[dict[str, Tensor], Callable[[Any], Any]]:
        """Return places of rows as a batch, and what makes the batch of these rows (Rule 6)."""
        size, given = trainer.args.per_device_train_batch_size, trainer.args
        if self._tokens is not None:
            raise OptionError(argument="seq", found=self._tokens, allowed="left out where batches are generated")
        if not isinstance(rows, list):
            raise UnsupportedError(f"{type(trainer).__name__} has batches that are neither tensors nor lists of rows")
        share = size / len(rows) / getattr(given, "num_iterations", 1)
        for part in trainer.model.modules():
            inside = any(has_method(child, "generate") for child in part.modules() if child is not part)
            if has_method(part, "generate") and not inside:
                part.generate = Generated(part, share)
        trainer.current_gradient_accumulation_steps = given.gradient_accumulation_steps

        def prepare(batch: dict[str, Tensor]) -> Any:
            times = len(batch["rows"]) // size
            given.per_device_train_batch_size = times * size
            begins(share)
            made = getattr(trainer, self._names.PREPARE_INPUTS)(rows * times)
            begins(1)
            given.per_device_train_batch_size = size
            return made

        return {"rows": torch.arange(size)}, prepare

    def _all_models(self, student: nn.Module) -> Rehearsed:
        of_student = set(student.modules())
        others = [m for m in self._models if m not in of_student and student not in set(m.modules())]
        return Rehearsed(student, others)

    def _precision(self, model: nn.Module) -> str:
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        alone = dtypes.pop() if len(dtypes) == 1 else torch.float32
        return MIXED.get(self._mixed, TRUE.get(alone, "32-true"))

    def _sized(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Give the rows of a batch as many tokens as were asked for."""
        ids, tokens = batch.get("input_ids"), self._tokens
        if tokens is None:
            return batch
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise OptionError(argument="seq", found=tokens, allowed="left out for batches without input_ids")

        def sized(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != ids.shape[1]:
                return tensor
            return tensor[:, :1].expand(-1, tokens, *tensor.shape[2:]).clone()

        return apply_to_collection(batch, Tensor, sized)  # type: ignore[no-any-return]

    def _steps(self, given: Any, loader: Any) -> int | None:
        if given.max_steps > 0:
            return int(given.max_steps)
        if self._is_cut or not hasattr(loader, "__len__"):
            return None
        of_epoch = max(-(-len(loader) // given.gradient_accumulation_steps), 1)
        steps: int = math.ceil(given.num_train_epochs * of_epoch)
        return steps


def _loss_of_trainer(
    trainer: Any, models: Rehearsed, prepare: Callable[[Any], Any], _: nn.Module, batch: dict[str, Any]
) -> Any:
    """Compute a Trainer's loss; numbers that it reads outside of the models' forwards are for its log (Rule 4)."""
    depth = 0

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    with contextlib.ExitStack() as stack:
        for model in (models.student, *models.others):
            stack.callback(model.register_forward_pre_hook(enter).remove)
            stack.callback(model.register_forward_hook(leave, always_call=True).remove)
        with unknown_numbers_are_one(lambda: not depth):
            return trainer.compute_loss(models.student, prepare(batch))


def _without_data(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _maker(optimizer: Any) -> Callable[[Any], Any] | None:
    """Return a function that makes such an optimizer over other parameters."""
    if optimizer is None:
        return None
    from ..planning.planned_model import arguments_of

    def make(parameters: Any) -> Any:
        return type(optimizer)(parameters, **arguments_of(optimizer))

    make.__name__ = type(optimizer).__name__
    return make

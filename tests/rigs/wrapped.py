"""Frozen weights that consist of several tensors: a class of our own, which nests, and those of torchao.

`adapted(form)` makes a net whose blocks are frozen linear layers of that form with adapters, as under LoRA.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
import sp_lightning

aten = torch.ops.aten
WIDTH, HIDDEN = 128, 256  # 256 blocks of 64 weights fit, which NF4 needs


class Coded(torch.Tensor):
    """A tensor as whole numbers and a factor for each row; the factors may be a Coded, too."""

    @staticmethod
    def __new__(cls, codes: Tensor, factors: Tensor, dtype: torch.dtype) -> Coded:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        made.codes, made.factors = codes, factors
        return made

    @classmethod
    def of(cls, plain: Tensor, nested: bool = True) -> Coded:
        factors = plain.detach().abs().amax(-1, keepdim=True) / 127 + 1e-6
        codes = (plain.detach() / factors).round().to(torch.int8)
        return cls(codes, cls.of(factors, False) if nested else factors, plain.dtype)

    def decoded(self) -> Tensor:
        factors = self.factors.decoded() if isinstance(self.factors, Coded) else self.factors
        return self.codes.to(self.dtype) * factors

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Coded:
        factors = self.factors.mapped(function) if isinstance(self.factors, Coded) else function(self.factors)
        return self.__class__(function(self.codes), factors, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "factors"], {"dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, shape: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["factors"], context["dtype"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return args[0].mapped(lambda part: func(part, **kwargs))
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0].mapped(lambda part: part.to(device=kwargs.get("device"), copy=True))
        if func is aten.t.default:
            return Turned(args[0])
        if func is aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].factors.copy_(args[1].factors)
            return args[0]
        plain = [arg.decoded() if isinstance(arg, Coded) else arg for arg in args]
        return func(*plain, **kwargs)

    def __repr__(self, **_: Any) -> str:
        return f"Coded({tuple(self.shape)})"


class Turned(Coded):
    """The transpose of a Coded, which is what autograd saves of a linear layer's weight."""

    @staticmethod
    def __new__(cls, of: Coded) -> Turned:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, of.shape[::-1], dtype=of.dtype, device=of.device)
        made.of = of
        return made

    def decoded(self) -> Tensor:
        return self.of.decoded().t()

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Coded:
        return Turned(self.of.mapped(function))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["of"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, shape: Any, stride: Any) -> Turned:
        return Turned(inner["of"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.t.default:
            return args[0].of.mapped(lambda part: part)  # a view is a new tensor
        return super().__torch_dispatch__(func, types, args, kwargs)


def coded(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(Coded.of(layer.weight), requires_grad=False)


def by_torchao(layer: nn.Linear, config: Callable[[Any], Any]) -> None:
    import torchao.quantization as torchao

    torchao.quantize_(layer, config(torchao))


def by_nvfp4(layer: nn.Linear) -> None:
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
    from torchao.quantization import quantize_

    quantize_(layer, NVFP4WeightOnlyConfig())


def by_nf4(layer: nn.Linear) -> None:
    from torchao.quantization import NF4Tensor

    weight = NF4Tensor.from_tensor(layer.weight.detach(), block_size=64, scaler_block_size=256)
    layer.weight = nn.Parameter(weight, requires_grad=False)


FORMS: dict[str, Callable[[nn.Linear], None]] = {
    "coded": coded,
    "int8": functools.partial(by_torchao, config=lambda of: of.Int8WeightOnlyConfig()),
    "nf4": by_nf4,
    "nvfp4": by_nvfp4,
    "float8": functools.partial(by_torchao, config=lambda of: of.Float8WeightOnlyConfig()),
    "intx4": functools.partial(by_torchao, config=lambda of: of.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
    "int8-dynamic": functools.partial(by_torchao, config=lambda of: of.Int8DynamicActivationInt8WeightConfig()),
}
TRAINED = [form for form in FORMS if form != "int8-dynamic"]  # whose kernels have a backward


def quantise(layer: nn.Linear, form: str) -> nn.Linear:
    if form != "coded" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    FORMS[form](layer.requires_grad_(False))
    return layer


class Adapted(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self, inside: int, outside: int, form: str) -> None:
        super().__init__()
        self.base = quantise(nn.Linear(inside, outside), form)
        self.shrink = nn.Linear(inside, 4, bias=False)
        self.grow = nn.Linear(4, outside, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.grow(self.shrink(x))


class AdaptedBlock(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Adapted(WIDTH, HIDDEN, form), Adapted(HIDDEN, WIDTH, form)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class AdaptedStack(models.Stack):
    """Takes the batches of the zoo's ordinary nets."""

    def __init__(self, form: str, count: int = 4) -> None:
        super().__init__(AdaptedBlock(form) for _ in range(count))
        self.stem, self.head = nn.Linear(models.FEATURES, WIDTH), nn.Linear(WIDTH, models.CLASSES)


def adapted(form: str, count: int = 4) -> Callable[[], AdaptedStack]:
    return functools.partial(AdaptedStack, form, count)


def train_on_ranks(options: dict[str, Any] | None, form: str, device: str = "cpu") -> list[Tensor]:
    """Losses and trained weights of this rank: under DDP without options, else streamed with them."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    net: Any = adapted(form)()
    call, handle, seen = net, contextlib.nullcontext(), []
    if options is None:
        device = "cpu"
        ignored = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignored(net, list(weights(net)))  # which DDP cannot broadcast
        call = nn.parallel.DistributedDataParallel(net)
    else:
        handle = sp_lightning.stream(net, device, group=dist.group.WORLD, **options)
    with handle:
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
        for step in range(3):
            x = models.vectors(2 * step + rank)[0].to(device)
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().cpu())
        seen += [p.detach().clone() for p in trained]
    dist.destroy_process_group()
    return seen


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts(getattr(tensor, name))]


def decoded(weight: Any) -> Tensor:
    """What a weight stands for, by its class's own method."""
    methods = ("decoded", "get_original_weight", "dequantize")
    return next(getattr(weight, name) for name in methods if hasattr(type(weight), name))()


def weights(net: nn.Module) -> dict[str, Tensor]:
    """The parameters that consist of several tensors."""
    return {name: p for name, p in net.named_parameters() if hasattr(type(p), "__tensor_flatten__")}

"""Frozen weights that consist of several tensors: a class of our own, which nests, and those of torchao.

`adapted(form)` makes a net whose blocks are frozen linear layers of that form with adapters, as under LoRA; `filed` the
same net with its weights in a file; `llama` a language model with peft's adapters.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import simccl
import torch
import torch.distributed as dist
from side_by_side import inputs, training
from torch import Tensor, nn

import models
import parity
import sp_lightning

aten = torch.ops.aten
WIDTH, HIDDEN = 128, 256  # 256 blocks of 64 weights fit, which NF4 needs
VOCABULARY = 64


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


def by_config(name: str, module: str = "torchao.quantization", **options: Any) -> Callable[[nn.Linear], None]:
    """What `torchao.quantize_` does with a configuration of this name, made with these options."""

    def quantise(layer: nn.Linear) -> None:
        config = getattr(importlib.import_module(module), name)(**options)
        importlib.import_module("torchao.quantization").quantize_(layer, config)

    return quantise


def by_nf4(layer: nn.Linear) -> None:
    from torchao.quantization import NF4Tensor

    weight = NF4Tensor.from_tensor(layer.weight.detach(), block_size=64, scaler_block_size=256)
    layer.weight = nn.Parameter(weight, requires_grad=False)


def by_mx(layer: nn.Linear, dtype: torch.dtype) -> None:
    """By kernels that are emulated, which are those for any device."""
    from torchao.quantization.quantize_.common import KernelPreference

    kind = {"activation_dtype": dtype, "weight_dtype": dtype, "kernel_preference": KernelPreference.EMULATED}
    by_config("MXDynamicActivationMXWeightConfig", MX, **kind)(layer.bfloat16())


MX = "torchao.prototype.mx_formats"
INT4 = "torchao.prototype.quantization.int4.inference_workflow"
FORMS: dict[str, Callable[[nn.Linear], None]] = {
    "coded": coded,
    "int8": by_config("Int8WeightOnlyConfig"),
    "nf4": by_nf4,
    "nvfp4": by_config("NVFP4WeightOnlyConfig", MX),
    "float8": by_config("Float8WeightOnlyConfig"),
    "intx4": by_config("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "int8-dynamic": by_config("Int8DynamicActivationInt8WeightConfig"),
    "intx4-dynamic": by_config("Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int4),
    "int4": by_config("PrototypeInt4WeightOnlyConfig", INT4, set_inductor_config=False),
    "mxfp8": functools.partial(by_mx, dtype=torch.float8_e4m3fn),
    "mxfp4": functools.partial(by_mx, dtype=torch.float4_e2m1fn_x2),
}
EVALUATED = ["int8-dynamic", "intx4-dynamic", "int4", "mxfp8", "mxfp4"]  # whose kernels have no backward
TRAINED = [form for form in FORMS if form not in EVALUATED]


def quantise(layer: nn.Linear, form: str) -> nn.Linear:
    if form != "coded" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    FORMS[form](layer.requires_grad_(False))
    return layer


def skip_unless_computed(form: str, device: torch.device) -> None:
    if form == "int4" and device.type != "cpu":
        pytest.skip("the kernels of this form are the CPU's")


class Adapted(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self, inside: int, outside: int, form: str) -> None:
        super().__init__()
        self.base = quantise(nn.Linear(inside, outside), form)
        self.shrink = nn.Linear(inside, 4, bias=False)
        self.grow = nn.Linear(4, outside, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kind = self.base.weight.dtype  # of some forms only half precision is computed
        return self.base(x.to(kind)).to(x.dtype) + self.grow(self.shrink(x))


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


def filed(form: str) -> Callable[[], AdaptedStack]:
    """The same net with all of its weights in a file, where those that are frozen may stay."""
    return functools.partial(in_a_file, adapted(form))


def in_a_file(make: Callable[[], Any]) -> Any:
    """Makes a module, saves its weights and maps them, as a loader of a checkpoint does."""
    net = make()
    place = os.path.join(tempfile.mkdtemp(dir=os.getcwd()), "base.pt")
    torch.save(net.state_dict(), place)
    net.load_state_dict(torch.load(place, mmap=True, weights_only=False), assign=True)
    return net


def llama(form: str) -> Callable[[], Any]:
    """A language model whose linear layers but the head are of that form, with peft's adapters."""

    def make() -> Any:
        base = plain_llama().requires_grad_(False)
        for name, module in list(base.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                quantise(module, form)
        return with_adapters(base)

    return make


def with_adapters(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def plain_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=3, **sizes)).eval()


def tokens(device: Any, number: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(number)).to(device)


def train_on_ranks(options: dict[str, Any] | None, form: str, device: str = "cpu") -> list[Any]:
    """Losses, trained weights and the bytes of the others, of this rank: under DDP without options, else streamed."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo" if options is None or device == "cpu" else simccl.register()
    dist.init_process_group(backend, rank=rank, world_size=size)
    torch.manual_seed(0)
    module: Any = adapted(form)()
    call, handle, seen = module, contextlib.nullcontext(), []
    if options is None:
        device = "cpu"
        ignored = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignored(module, list(weights(module)))  # which DDP cannot broadcast
        call = nn.parallel.DistributedDataParallel(module)
    else:
        handle = sp_lightning.stream(module, device, group=dist.group.WORLD, **options)
    with handle:
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
        for step in range(3):
            loss = call(models.vectors(2 * step + rank)[0].to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().cpu())
        with torch.no_grad():
            seen.append(call(models.vectors(7 + rank)[0].to(device)).cpu())
        seen += [p.detach().clone() for p in trained]
    seen += [part.clone() for weight in weights(module).values() for part in parts(weight)]
    dist.destroy_process_group()
    return seen


class Module(L.LightningModule):
    """Its checkpoints have what trains: Lightning cannot read others of such weights, plainly either."""

    def __init__(self, form: str, make: Callable[[str], Callable[[], nn.Module]] = adapted) -> None:
        super().__init__()
        self.strict_loading = False
        self.net = make(form)()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, foreach=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        frozen = {name for name, p in self.named_parameters() if not p.requires_grad}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k not in frozen}


def compare(one: Module, other: Module) -> None:
    """Compares two modules after their fits."""
    parity.assert_same(*([dict(module.named_parameters()), module.losses] for module in (one, other)))


def trained_and_evaluated(module: nn.Module, device: torch.device) -> Iterator[Any]:
    """Trains, and computes without gradients."""
    yield from training()(module, device)
    with torch.no_grad():
        yield [module(x) for x in inputs(device, 2)]
    with torch.inference_mode():
        yield [module(x) for x in inputs(device, 2)]


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

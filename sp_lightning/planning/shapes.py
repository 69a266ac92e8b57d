"""Models to plan for and to measure with: published shapes, with random weights.

Each model returns its loss for a batch. Weights repeat a million random numbers: drawing all of a large model's weights
would take longer than measuring it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import OptionError

Batch: TypeAlias = dict[str, Tensor]

DEVIATION = 0.02  # standard deviation of weights, as in transformers
LABELS = 1000


class Shape(Protocol):
    """A model, its inputs, and how many tokens each of its parameters is multiplied with."""

    @property
    def batch(self) -> int:
        """Default number of sequences."""

    @property
    def seq(self) -> int:
        """Default number of tokens in a sequence."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Class names of the repeated blocks."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Libraries that the model needs beside torch."""

    @property
    def answers(self) -> bool:
        """Whether the model generates tokens, by a method ``answer`` that returns the loss of those."""

    def check(self, seq: int) -> None:
        """Raise OptionError for a sequence length that the model cannot have."""

    def make(self) -> nn.Module:
        """Make the model, with any weights."""

    def inputs(self, batch: int, seq: int, generator: torch.Generator) -> Batch:
        """Make a batch of inputs."""

    def tokens(self, parameter: str, batch: int, seq: int) -> int:
        """Count the real tokens of such a batch that a parameter of this name is multiplied with, if it is used so."""


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A causal transformer that needs only torch."""

    width: int
    layers: int
    vocabulary: int
    batch: int
    seq: int
    blocks: tuple[str, ...] = ("_ToyBlock",)
    needs: tuple[str, ...] = ()
    answers: bool = False

    def check(self, seq: int) -> None:
        """Accept any sequence length."""

    def make(self) -> nn.Module:
        """Make the model, with attention of four heads."""
        return _Toy(self.width, self.layers, self.vocabulary)

    def inputs(self, batch: int, seq: int, generator: torch.Generator) -> Batch:
        """Make random tokens; the model predicts each from those before."""
        return {"tokens": torch.randint(self.vocabulary, (batch, seq + 1), generator=generator)}

    def tokens(self, parameter: str, batch: int, seq: int) -> int:
        """Count all tokens."""
        return batch * seq


class _Toy(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_ToyBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


class _ToyBlock(nn.Module):
    HEADS = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.attention(self.norms[0](hidden)).unflatten(-1, (3, self.HEADS, -1)).transpose(1, 3)
        queries, keys, values = heads.unbind(2)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).flatten(2))
        out: Tensor = hidden + self.mlp(self.norms[1](hidden))
        return out


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A decoder with grouped-query attention and gated MLPs."""

    hidden: int
    layers: int
    heads: int
    keys: int
    intermediate: int
    vocabulary: int
    tied: bool
    batch: int
    seq: int
    blocks: tuple[str, ...] = ("LlamaDecoderLayer",)
    needs: tuple[str, ...] = ("transformers",)
    answers: bool = True

    def check(self, seq: int) -> None:
        """Accept any sequence length."""

    def config(self) -> Any:
        """Return the shape as a config of the transformers library."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.keys,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=131072,
            use_cache=False,
        )

    def make(self) -> nn.Module:
        """Make the model of transformers."""
        from transformers import LlamaForCausalLM

        return _WithLoss(LlamaForCausalLM(self.config()))

    def inputs(self, batch: int, seq: int, generator: torch.Generator) -> Batch:
        """Make random tokens, all real."""
        tokens = torch.randint(self.vocabulary, (batch, seq), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    def tokens(self, parameter: str, batch: int, seq: int) -> int:
        """Count all tokens."""
        return batch * seq


@dataclass(frozen=True, kw_only=True)
class _Tower:
    """A transformer over the patches of an image."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    image: int
    patch: int

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image // self.patch) ** 2

    def settings(self) -> dict[str, int]:
        """Return the tower's settings, under the names that transformers gives them."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate,
            "image_size": self.image,
            "patch_size": self.patch,
        }

    def noise(self, batch: int, generator: torch.Generator) -> Tensor:
        """Make images of noise."""
        return torch.randn(batch, 3, self.image, self.image, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Vit(_Tower):
    """A classifier of images."""

    batch: int
    blocks: tuple[str, ...] = ("ViTLayer",)
    needs: tuple[str, ...] = ("transformers",)
    answers: bool = False

    @property
    def seq(self) -> int:
        """Number of patches, and one token for the class."""
        return self.patches + 1

    def check(self, seq: int) -> None:
        """Raise OptionError unless this is the model's only sequence length."""
        if seq != self.seq:
            raise OptionError(argument="seq", found=seq, allowed=f"{self.seq} for this model: patches and a class")

    def make(self) -> nn.Module:
        """Make the model of transformers."""
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(**self.settings(), num_labels=LABELS)  # type: ignore[arg-type, call-arg]  # every config takes it
        return _WithLoss(ViTForImageClassification(config))

    def inputs(self, batch: int, seq: int, generator: torch.Generator) -> Batch:
        """Make images of noise, and a class for each."""
        return {
            "pixel_values": self.noise(batch, generator),
            "labels": torch.randint(LABELS, (batch,), generator=generator),
        }

    def tokens(self, parameter: str, batch: int, seq: int) -> int:
        """Count all tokens, but for the classifier one per image."""
        return batch if "classifier" in parameter else batch * seq


@dataclass(frozen=True, kw_only=True)
class Llava(_Tower):
    """A vision tower whose patches are tokens of a decoder."""

    text: Llama
    batch: int
    seq: int  # tokens of the decoder: patches and text
    blocks: tuple[str, ...] = ("LlamaDecoderLayer", "CLIPEncoderLayer")
    needs: tuple[str, ...] = ("transformers",)
    answers: bool = True

    def check(self, seq: int) -> None:
        """Raise OptionError unless an image and some text fit into a sequence."""
        if seq <= self.patches:
            raise OptionError(argument="seq", found=seq, allowed=f"more than the {self.patches} patches of an image")

    def make(self) -> nn.Module:
        """Make the model of transformers; the tower is trained, too."""
        from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**self.settings()),  # type: ignore[arg-type]
            text_config=self.text.config(),
            image_token_index=self.text.vocabulary - 1,
            vision_feature_layer=-1,  # all of the tower is trained
            tie_word_embeddings=self.text.tied,
        )
        return _WithLoss(LlavaForConditionalGeneration(config), use_cache=False)

    def inputs(self, batch: int, seq: int, generator: torch.Generator) -> Batch:
        """Make texts with an image of noise before each."""
        tokens = torch.randint(self.text.vocabulary - 1, (batch, seq), generator=generator)
        labels = tokens.clone()
        tokens[:, : self.patches] = self.text.vocabulary - 1
        labels[:, : self.patches] = -100
        return {"input_ids": tokens, "pixel_values": self.noise(batch, generator), "labels": labels}

    def tokens(self, parameter: str, batch: int, seq: int) -> int:
        """Count patches and a class token in the tower, patches in the projector, all tokens in the decoder."""
        if "vision_tower" in parameter:
            return batch * (self.patches + 1)
        return batch * self.patches if "multi_modal_projector" in parameter else batch * seq


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, **always: Any) -> None:
        super().__init__()
        self.model = model
        self._always = always

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(**inputs, **self._always).loss
        return loss

    def answer(self, tokens: int, *, labels: Tensor, **prompt: Tensor) -> Tensor:
        """Generate this number of tokens for each row, the likeliest ones, and return their mean loss."""
        loss = _LossOfLikeliest()
        self.model.generate(  # type: ignore[operator]
            **prompt,
            attention_mask=torch.ones_like(prompt["input_ids"]),
            logits_processor=[loss],
            do_sample=False,
            use_cache=True,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
        return loss.sum() / tokens


class _LossOfLikeliest:
    """A logits processor that adds up the mean loss of each pass's likeliest tokens."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        logits = logits.float()
        self._losses.append((logits.logsumexp(-1) - logits.amax(-1)).mean())
        return logits

    def sum(self) -> Tensor:
        """Return the sum over all passes."""
        return torch.stack(self._losses).sum()


# ---- weights


def build(shape: Shape) -> nn.Module:
    """Build the model with its weights, which are the same every time."""
    with torch.random.fork_rng(devices=[]), _MatricesLater():
        torch.manual_seed(0)
        module = shape.make()
    # A prime number of values, so that no two rows of a matrix are alike.
    block = DEVIATION * torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    for parameter in module.parameters():
        if parameter.dim() > 1 and not parameter.is_meta:
            for piece in torch.split(parameter.data.view(-1), len(block)):
                piece.copy_(block[: len(piece)])
    return module


class _MatricesLater(TorchFunctionMode):
    """A mode in which initialization draws random numbers for vectors only.

    Matrices are zeros, which also ends loops that redraw values they reject.
    """

    RANDOM: tuple[Callable[..., Any], ...] = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_)
    RANDOM += (nn.init.kaiming_uniform_, nn.init.trunc_normal_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.RANDOM:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.dim() > 1:
                with torch.no_grad():
                    return tensor.zero_()
        return func(*args, **kwargs)


def multiplied(module: nn.Module) -> dict[str, int]:
    """Count the elements of each parameter that a token is multiplied with: none in a table that is only looked up."""
    tables = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    tables -= {id(child.weight) for child in module.modules() if isinstance(child, nn.Linear)}
    return {name: 0 if id(p) in tables else math.prod(p.shape) for name, p in module.named_parameters()}


_LLAMA_1B = Llama(
    hidden=2048, layers=16, heads=32, keys=8, intermediate=8192, vocabulary=128256, tied=True, batch=4, seq=2048
)
_LLAMA_3B = Llama(
    hidden=3072, layers=28, heads=24, keys=8, intermediate=8192, vocabulary=128256, tied=True, batch=4, seq=2048
)
_LLAMA_TINY = Llama(hidden=128, layers=4, heads=4, keys=2, intermediate=256, vocabulary=512, tied=True, batch=2, seq=64)

# Widths and depths are those of the models' published config.json files: Llama 3.2 1B and 3B, Llama 3.1 8B and 70B,
# ViT-H/14, and CLIP's ViT-L/14 at 336 pixels as LLaVA's tower.
SHAPES: dict[str, Shape] = {
    "tiny": Toy(width=256, layers=8, vocabulary=1024, batch=4, seq=128),
    "llama-tiny": _LLAMA_TINY,
    "llama-1b": _LLAMA_1B,
    "llama-3b": _LLAMA_3B,
    "llama-8b": Llama(
        hidden=4096, layers=32, heads=32, keys=8, intermediate=14336, vocabulary=128256, tied=False, batch=4, seq=2048
    ),
    "llama-70b": Llama(
        hidden=8192, layers=80, heads=64, keys=8, intermediate=28672, vocabulary=128256, tied=False, batch=4, seq=2048
    ),
    "vit-tiny": Vit(hidden=64, layers=4, heads=2, intermediate=128, image=32, patch=8, batch=4),
    "vit-h": Vit(hidden=1280, layers=32, heads=16, intermediate=5120, image=224, patch=14, batch=64),
    "llava-tiny": Llava(
        text=_LLAMA_TINY, hidden=64, layers=4, heads=2, intermediate=128, image=32, patch=8, batch=2, seq=64
    ),
    **{
        f"llava-{size}": Llava(
            text=text, hidden=1024, layers=24, heads=16, intermediate=4096, image=336, patch=14, batch=4, seq=2048
        )
        for size, text in (("1b", _LLAMA_1B), ("3b", _LLAMA_3B))
    },
}

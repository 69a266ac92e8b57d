"""Model families as users train them: tiny ones with random weights, by the classes of transformers and torchvision.

`models.py` has a net for each trait that streaming could get wrong; here are the models that people name. `FAMILIES`
maps names to `Family`s; each says what is special about its weights. All train on `spread`, which takes any output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from models import VOCABULARY, generator, transformer

BATCH, LENGTH, IMAGE = 2, 8, 32


@dataclass(frozen=True)
class Family:
    """A family, by one small member."""

    case: models.Case
    special: str  # about its weights, as benchmarks/models.py prints it


def outputs(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in an output, whatever holds them."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from outputs(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from outputs(item)


def called(net: nn.Module, batch: dict[str, Any]) -> Any:
    return net(*batch["args"]) if "args" in batch else net(**batch)


def spread(net: nn.Module, batch: dict[str, Any]) -> Tensor:
    """How far all outputs that gradients lead back from are from zero."""
    found = [value for value in outputs(called(net, batch)) if value.requires_grad or not torch.is_grad_enabled()]
    return torch.stack([value.float().square().mean() for value in found]).sum()


def predictions(net: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    return list(outputs(called(net, batch)))


# --- Batches


def ids(index: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator(index))


def noise(index: int, *shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=generator(index))


def text(index: int) -> dict[str, Any]:
    return {"input_ids": ids(index)}


def two_texts(index: int) -> dict[str, Any]:
    return {"input_ids": ids(index), "decoder_input_ids": ids(index + 100)}


def picture(index: int) -> dict[str, Any]:
    return {"pixel_values": noise(index, 3, IMAGE, IMAGE)}


def picture_and_text(index: int) -> dict[str, Any]:
    return {"pixel_values": noise(index, 3, IMAGE, IMAGE), "input_ids": ids(index)}


def picture_in_text(image_tokens: int, image_token: int = 2) -> Callable[[int], dict[str, Any]]:
    """The picture's places in the text hold its token."""

    def batch(index: int) -> dict[str, Any]:
        places = torch.full((BATCH, image_tokens), image_token)
        input_ids = torch.cat([places, ids(index)], dim=1)
        mask = torch.ones_like(input_ids)
        return {"pixel_values": noise(index, 3, IMAGE, IMAGE), "input_ids": input_ids, "attention_mask": mask}

    return batch


def qwen_picture_in_text(index: int) -> dict[str, Any]:
    """Of 4 x 4 patches, merged four to one."""
    input_ids = torch.cat([torch.full((BATCH, 1), 58), torch.full((BATCH, 4), 60), ids(index) % 50 + 3], dim=1)
    patches = torch.randn(BATCH * 16, 3 * 2 * 8 * 8, generator=generator(index))
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    types = (input_ids == 60).int()
    return {
        "input_ids": input_ids,
        "pixel_values": patches,
        "image_grid_thw": grid,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": types,
    }


def sound(index: int) -> dict[str, Any]:
    return {"input_values": noise(index, 400)}


def spectrum_and_text(index: int) -> dict[str, Any]:
    return {"input_features": noise(index, 8, 32), "decoder_input_ids": ids(index)}


def positional(*shapes: tuple[int, ...]) -> Callable[[int], dict[str, Any]]:
    return lambda index: {"args": tuple(noise(index + 100 * i, *shape) for i, shape in enumerate(shapes))}


plain_pictures = positional((3, IMAGE, IMAGE))


def noisy_picture(index: int) -> dict[str, Any]:
    return {"args": (noise(index, 4, 8, 8), torch.rand(BATCH, generator=generator(index)))}


def two_pictures(index: int) -> dict[str, Any]:
    """And how often their flow is refined."""
    return {"args": (noise(index, 3, 128, 128), noise(index + 100, 3, 128, 128), 2)}


def boxed_pictures(index: int) -> dict[str, Any]:
    boxes = torch.tensor([[2.0, 2.0, 20.0, 24.0], [8.0, 6.0, 30.0, 30.0]])
    targets = [{"boxes": boxes + index % 2, "labels": torch.tensor([1, 2])} for _ in range(BATCH)]
    return {"args": (list(noise(index, 3, IMAGE, IMAGE)), targets)}


# --- Diffusion models, which neither library has: the two shapes that people train.


class Modulated(nn.Module):
    """A diffusion transformer's block: scales and shifts come from the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.modulation = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, mlp_gate = self.modulation(F.silu(time))[:, None].chunk(4, dim=-1)
        hidden = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return x + mlp_gate * self.mlp(self.norm(x))


class DiffusionTransformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Modulated(width) for _ in range(4))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        embedded = self.time(time[:, None])
        for block in self.blocks:
            hidden = block(hidden, embedded)
        return self.head(hidden)


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, inner)
        self.first = nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(time, outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(F.silu(hidden))


class UNet(nn.Module):
    """Down, across and up; what went down comes back beside what goes up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 16))
        self.entry = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, 16), Residual(width, 2 * width, 16)])
        self.middle = Residual(2 * width, 2 * width, 16)
        self.up = nn.ModuleList([Residual(4 * width, width, 16), Residual(2 * width, width, 16)])
        self.exit = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        embedded, hidden, left = self.time(time[:, None]), self.entry(x), []
        for block in self.down:
            hidden = block(hidden, embedded)
            left.append(hidden)
            hidden = F.avg_pool2d(hidden, 2)
        hidden = self.middle(hidden, embedded)
        for block in self.up:
            hidden = F.interpolate(hidden, scale_factor=2.0)
            hidden = block(torch.cat([hidden, left.pop()], dim=1), embedded)
        return self.exit(hidden)


# --- transformers

SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
ENCODER = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT_ENCODER = {**ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
VISION = {**ENCODER, "image_size": IMAGE, "patch_size": 8}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 4, **SPECIAL_TOKENS}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 56, "num_layers": 3, "num_heads": 4}
BIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    **SPECIAL_TOKENS,
}
GPT_LIKE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "experts_implementation": "eager"}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 4, "use_mambapy": False}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}


def qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text_config = {**BIG, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 8, "mlp_ratio": 2}
    tokens = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text_config, vision_config=vision, **tokens))


def blip2() -> nn.Module:
    from transformers import Blip2Config, Blip2ForConditionalGeneration, Blip2QFormerConfig, OPTConfig

    qformer = Blip2QFormerConfig(**TEXT_ENCODER, encoder_hidden_size=32, cross_attention_frequency=1)
    opt = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = Blip2Config(
        vision_config=VISION, qformer_config=qformer.to_dict(), text_config=opt.to_dict(), num_query_tokens=4,
        image_token_index=60, image_text_hidden_size=16,
    )  # fmt: skip
    return Blip2ForConditionalGeneration(config)


def clip() -> nn.Module:
    text = {**TEXT_ENCODER, **SPECIAL_TOKENS}
    settings = {"text_config": text, "vision_config": VISION, "projection_dim": 16}
    return transformer("CLIPModel", "CLIPConfig", **settings)()


def detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    sizes = {
        name: SEQ2SEQ[name] for name in SEQ2SEQ if name.startswith(("encoder_", "decoder_")) and "token" not in name
    }
    return DetrForObjectDetection(
        DetrConfig(
            **sizes, d_model=32, num_queries=5, num_labels=3, use_timm_backbone=False, use_pretrained_backbone=False,
            backbone=None, backbone_config=backbone,
        )
    )  # fmt: skip


def language_models() -> Iterator[tuple[str, str, str, str, dict[str, Any]]]:
    """Name, class, config's class, what is special, settings."""
    yield "llama", "LlamaForCausalLM", "LlamaConfig", "rotary buffers", BIG
    yield "qwen2", "Qwen2ForCausalLM", "Qwen2Config", "tied head, biases", {**BIG, "tie_word_embeddings": True}
    yield "qwen3", "Qwen3ForCausalLM", "Qwen3Config", "norms of queries and keys", {**BIG, "head_dim": 8}
    yield "gemma", "GemmaForCausalLM", "GemmaConfig", "tied head, scaled embedding", {**BIG, "head_dim": 8}
    yield "gemma2", "Gemma2ForCausalLM", "Gemma2Config", "alternating attention, capped", {**BIG, "head_dim": 8}
    yield "gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", "local and global rotary buffers", {**BIG, "head_dim": 8}
    yield "phi", "PhiForCausalLM", "PhiConfig", "attention beside MLP", BIG
    yield "phi3", "Phi3ForCausalLM", "Phi3Config", "fused projections", BIG
    yield "gpt2", "GPT2LMHeadModel", "GPT2Config", "tied head, transposed weights", GPT2
    yield "gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", "partly rotary", {**GPT_LIKE, "intermediate_size": 48}
    opt = {**GPT_LIKE, "ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 32}
    yield "opt", "OPTForCausalLM", "OPTConfig", "tied head, learned positions", opt
    yield (
        "bloom",
        "BloomForCausalLM",
        "BloomConfig",
        "tied head, linear biases",
        {**GPT_LIKE, "n_layer": 3, "n_head": 4},
    )
    yield "falcon", "FalconForCausalLM", "FalconConfig", "one key for all heads", GPT_LIKE
    yield "mixtral", "MixtralForCausalLM", "MixtralConfig", "experts", {**BIG, **EXPERTS, "num_local_experts": 4}
    qwen = {**BIG, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
    yield "qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", "experts and a shared one", qwen
    qwen3 = {**BIG, **EXPERTS, "num_experts": 4, "head_dim": 8}
    yield "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", "experts", qwen3
    deepseek = {**BIG, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    deepseek |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    deepseek |= {"first_k_dense_replace": 1, "num_key_value_heads": 4}
    yield "deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", "low-rank attention, routed experts", deepseek
    yield "mamba", "MambaForCausalLM", "MambaConfig", "state space: recurrent state, raw parameters", MAMBA
    yield "bert", "BertForMaskedLM", "BertConfig", "tied head", TEXT_ENCODER
    yield "roberta", "RobertaForMaskedLM", "RobertaConfig", "tied head", {**TEXT_ENCODER, "pad_token_id": 0}
    albert = {**TEXT_ENCODER, "embedding_size": 16}
    yield "albert", "AlbertForMaskedLM", "AlbertConfig", "one layer visited again and again", albert
    deberta = {**TEXT_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
    yield "deberta_v2", "DebertaV2ForMaskedLM", "DebertaV2Config", "relative positions shared by all layers", deberta


def encoder_decoders() -> Iterator[tuple[str, str, str, str, dict[str, Any]]]:
    t5 = {**T5, "decoder_start_token_id": 0}
    yield "t5", "T5ForConditionalGeneration", "T5Config", "tied embeddings, shared relative positions", t5
    bart = {**SEQ2SEQ, "max_position_embeddings": 32}
    yield "bart", "BartForConditionalGeneration", "BartConfig", "tied embeddings, cross-attention", bart


def towers() -> Iterator[tuple[str, str, Callable[[int], Any], str, dict[str, Any]]]:
    """The classes' name and suffix, batches, what is special, settings."""
    whisper = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "use_cache": False}
    yield "Whisper", "ForConditionalGeneration", spectrum_and_text, "tied head, convolutions first", whisper
    wav2vec2 = {**TEXT_ENCODER, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8]}
    wav2vec2 |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    wav2vec2 |= {"mask_time_prob": 0.0, "layerdrop": 0.0}
    yield "Wav2Vec2", "ForCTC", sound, "weight norm on a convolution", wav2vec2
    yield "ViT", "ForImageClassification", picture, "class token", VISION
    yield "Dinov2", "ForImageClassification", picture, "layer scale", VISION
    swin = {"image_size": IMAGE, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    swin |= {"window_size": 4}
    yield "Swin", "ForImageClassification", picture, "stages of two sizes, relative-position biases", swin
    convnext = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2}
    yield "ConvNext", "ForImageClassification", picture, "layer scale", convnext
    siglip = {"text_config": {**TEXT_ENCODER, "projection_size": 32}, "vision_config": VISION}
    yield "Siglip", "Model", picture_and_text, "two towers, pooling by attention", siglip
    llava = {
        "text_config": {**BIG, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
    }
    llava |= {"image_token_id": 2, "image_token_index": 2}
    yield "Llava", "ForConditionalGeneration", picture_in_text(16), "tower, projector and language model", llava
    tower = {**VISION, "model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False}
    paligemma = {"text_config": {**BIG, "model_type": "gemma", "head_dim": 8}, "vision_config": tower}
    paligemma |= {"projection_dim": 32, "hidden_size": 32, "image_token_index": 2}
    yield "PaliGemma", "ForConditionalGeneration", picture_in_text(16), "tower, projector, tied head", paligemma


def transformers_families() -> Iterator[Family]:
    def family(name: str, make: Callable[[], nn.Module], batch: Callable[[int], Any], special: str) -> Family:
        return Family(models.Case(name, make, batch, spread, predictions, tags=frozenset({"transformers"})), special)

    for name, net, config, special, settings in language_models():
        settings = {**settings, "use_cache": False}
        yield family(name, transformer(net, config, **settings), text, special)
    for name, net, config, special, settings in encoder_decoders():
        yield family(name, transformer(net, config, **settings, use_cache=False), two_texts, special)
    yield family("clip", clip, picture_and_text, "two towers")
    yield family("blip2", blip2, picture_in_text(4, 60), "two towers and queries between them")
    yield family("qwen2_vl", qwen2_vl, qwen_picture_in_text, "tower of merged patches, three-way positions")
    yield family("detr", detr, picture, "convolutional backbone, queries, frozen norms")
    for stem, suffix, batch, special, settings in towers():
        yield family(stem.lower(), transformer(stem + suffix, f"{stem}Config", **settings), batch, special)


# --- torchvision


def torchvision_families() -> Iterator[Family]:
    def family(
        name: str,
        make: Callable[[], nn.Module],
        special: str,
        batch: Callable[[int], Any] = plain_pictures,
    ) -> Family:
        return Family(models.Case(name, make, batch, spread, predictions, tags=frozenset({"torchvision"})), special)

    def built(path: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            import importlib

            module, name = path.rsplit(".", 1)
            net: nn.Module = getattr(importlib.import_module(f"torchvision.models.{module}"), name)(*args, **kwargs)
            return net

        return make

    yield family("tv_resnet", resnet, "batch norm")
    yield family("tv_regnet", regnet, "squeeze and excitation")
    yield family("tv_efficientnet", efficientnet, "stochastic depth, batch norm")
    yield family(
        "tv_densenet", built("densenet.DenseNet", 4, (2, 2), 8, num_classes=5), "every layer reads all before it"
    )
    yield family("tv_convnext", convnext, "layer scale as a raw parameter")
    yield family("tv_vit", vision_transformer, "MultiheadAttention")
    yield family("tv_swin", swin, "relative-position biases")
    yield family(
        "tv_maxvit",
        built("maxvit.MaxVit", (64, 64), 8, 2, [8, 16], [1, 1], 4, 0.1, num_classes=5),
        "blocks and grids of attention",
        positional((3, 64, 64)),
    )
    yield family(
        "tv_deeplab",
        built("segmentation.deeplabv3_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=3),
        "a backbone whose layers are read by name",
    )
    yield family("tv_faster_rcnn", faster_rcnn, "feature pyramid, shared heads", boxed_pictures)
    yield family("tv_raft", raft, "one update block visited again and again", two_pictures)
    yield family("tv_video", video, "3-D convolutions", positional((3, 4, 16, 16)))


def resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    net = ResNet(BasicBlock, [2, 2, 1, 1], num_classes=5)
    net.inplanes = 128  # of layer2; without its 256 and 512 channels, 30 million bytes less are trained
    net.layer3, net.layer4 = (net._make_layer(BasicBlock, 64, 1, stride=2) for _ in range(2))
    net.fc = nn.Linear(64, 5)
    return net


def vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    net = VisionTransformer(IMAGE, 8, 3, 2, 32, 56, dropout=0.1, num_classes=5)
    nn.init.normal_(net.heads.head.weight, std=0.1)  # torchvision starts it at zero, and no gradient would pass
    return net


def swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.4, num_classes=5)


def regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    return RegNet(BlockParams.from_init_params(2, 8, 8.0, 2.0, 8, se_ratio=0.25), num_classes=5)


def efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    setting = [MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0), MBConvConfig(4, 3, 2, 8, 16, 2, 1.0, 1.0)]
    return EfficientNet(setting, dropout=0.1, num_classes=5)


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)], num_classes=5)


def faster_rcnn() -> nn.Module:
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    return fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=IMAGE, max_size=IMAGE, trainable_backbone_layers=6
    )


def raft() -> nn.Module:
    from torchvision.models.optical_flow import raft_small

    return raft_small(weights=None)


def video() -> nn.Module:
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    return VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=5)


def diffusion_families() -> Iterator[Family]:
    def family(name: str, make: Callable[[], nn.Module], special: str) -> Family:
        return Family(models.Case(name, make, noisy_picture, spread, predictions), special)

    yield family("diffusion_transformer", DiffusionTransformer, "modulated by the time")
    yield family("unet", UNet, "skips from down to up, no module list of blocks alone")


# --- Further families of both libraries, picked for what few others do


def unlabelled_video(index: int) -> dict[str, Any]:
    return {"pixel_values": noise(index, 4, 3, IMAGE, IMAGE)}


def large_picture(index: int) -> dict[str, Any]:
    return {"pixel_values": noise(index, 3, 64, 64)}


def waveform(index: int) -> dict[str, Any]:
    return {"input_values": noise(index, 1, 64)}


def long_text(index: int) -> dict[str, Any]:
    return {"input_ids": ids(index, 64)}


def latent_text(index: int) -> dict[str, Any]:
    return {"inputs": ids(index, 16)}


def spectrum_and_caption(index: int) -> dict[str, Any]:
    return {"input_ids": ids(index), "input_features": noise(index, 1, 128, 8)}


def picture_and_queries(index: int) -> dict[str, Any]:
    queries = torch.randint(3, VOCABULARY - 1, (2 * BATCH, LENGTH), generator=generator(index))
    return {**picture(index), "input_ids": queries, "attention_mask": torch.ones_like(queries)}


def picture_and_points(index: int) -> dict[str, Any]:
    return {**picture(index), "input_points": torch.rand(BATCH, 1, 2, 2, generator=generator(index)) * IMAGE}


def speech_and_speaker(index: int) -> dict[str, Any]:
    return {"input_ids": ids(index), "decoder_input_values": noise(index, 8, 8), "speaker_embeddings": noise(index, 8)}


def moves(index: int) -> dict[str, Any]:
    sizes = {"states": 5, "actions": 3, "rewards": 1, "returns_to_go": 1}
    seen = {name: noise(index + 100 * i, 4, size) for i, (name, size) in enumerate(sizes.items())}
    return {**seen, "timesteps": torch.arange(4).expand(BATCH, 4), "attention_mask": torch.ones(BATCH, 4)}


def series(index: int) -> dict[str, Any]:
    return {
        "past_values": noise(index, 13).abs() + 1,
        "past_time_features": noise(index + 100, 13, 2),
        "past_observed_mask": torch.ones(BATCH, 13),
        "future_values": noise(index + 200, 4).abs() + 1,
        "future_time_features": noise(index + 300, 4, 2),
    }


NARROW = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "use_cache": False}
T5_LIKE = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
SPEECH = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
SPEECH |= {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2}
SPEECH |= {"vocab_size": VOCABULARY, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
SPEECH |= {"mask_time_prob": 0.0}
SERIES = {"prediction_length": 4, "context_length": 8, "num_time_features": 2, "lags_sequence": [1, 2, 3, 4, 5]}
SERIES |= {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in
           {"layers": 2, "attention_heads": 2, "ffn_dim": 24}.items()}  # fmt: skip
VOICE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "flow_size": 16}
VOICE |= {"spectrogram_bins": 9, "upsample_initial_channel": 16, "upsample_rates": [4, 2]}
VOICE |= {"upsample_kernel_sizes": [8, 4], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 2]]}
VOICE |= {"prior_encoder_num_flows": 2, "prior_encoder_num_wavenet_layers": 2, "duration_predictor_num_flows": 2}
VOICE |= {"posterior_encoder_num_wavenet_layers": 2, "depth_separable_num_layers": 2}
SOUNDS = {"spec_size": 32, "window_size": 4, "patch_size": 2, "patch_stride": [2, 2], "patch_embeds_hidden_size": 16}
SOUNDS |= {"num_mel_bins": 8, "hidden_size": 32, "depths": [1, 1], "num_attention_heads": [2, 2], "projection_dim": 16}
SPEAKING = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in
            {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()}  # fmt: skip
SPEAKING |= {"speech_decoder_prenet_units": 16, "speech_decoder_postnet_units": 16, "speaker_embedding_dim": 8}
SPEAKING |= {"vocab_size": VOCABULARY, "hidden_size": 32, "num_mel_bins": 8, "num_conv_pos_embedding_groups": 2}
SPEAKING |= {"num_conv_pos_embeddings": 4, "speech_decoder_postnet_layers": 2}
DETECTION = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
DETECTION |= {"out_features": ["stage2", "stage3", "stage4"], "model_type": "rt_detr_resnet"}
EXPERTS_ALONE = {"experts_implementation": "eager", "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2}


def further_language_families() -> Iterator[tuple[str, str, Callable[[int], Any], str, dict[str, Any]]]:
    """The classes' name and suffix, batches, what is special, settings."""
    mobile = {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16}
    mobile |= {"num_feedforward_networks": 2}
    yield "MobileBert", "ForMaskedLM", text, "a head that joins a tied weight and its own", {**TEXT_ENCODER, **mobile}
    rwkv = {"attention_hidden_size": 32, "intermediate_size": 48, "context_length": 32}
    yield "Rwkv", "ForCausalLM", text, "mixed over time, rescaled for evaluation", {**NARROW, **rwkv}
    mamba = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}
    yield "Mamba2", "ForCausalLM", text, "state space in chunks", {**NARROW, **mamba}
    griffin = {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 48, "lru_width": 32}
    griffin |= {"attention_window_size": 8}
    yield "RecurrentGemma", "ForCausalLM", text, "linear recurrences by turns with attention", {**NARROW, **griffin}
    zamba = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2}
    zamba |= {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_attention_heads": 4}
    zamba |= {"num_key_value_heads": 4, "intermediate_size": 48, "pad_token_id": 0}
    yield "Zamba", "ForCausalLM", text, "one attention block in several layers", {**NARROW, **zamba}
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    linear |= {"linear_value_head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
    linear |= {"shared_expert_intermediate_size": 16, "use_cache": False}
    yield "Qwen3Next", "ForCausalLM", text, "linear attention, experts", {**TEXT_ENCODER, **EXPERTS_ALONE, **linear}
    sinks = {"num_local_experts": 4, "use_cache": False}
    yield "GptOss", "ForCausalLM", text, "attention sinks, experts with biases", {
        **TEXT_ENCODER, **EXPERTS_ALONE, **sinks
    }  # fmt: skip
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "n_head": 4, "d_inner": 48}
    yield "XLNet", "LMHeadModel", text, "relative positions as raw parameters", {**sizes, "n_layer": 3}
    pooled = {"d_head": 8, "block_sizes": [1, 2], "num_decoder_layers": 1}
    yield "Funnel", "ForMaskedLM", text, "pooled between blocks, skips to the end", {**sizes, **pooled}
    yield "Longformer", "ForMaskedLM", text, "local and global attention", {**TEXT_ENCODER, "attention_window": 4}
    sparse = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 64}
    yield "BigBird", "ForMaskedLM", long_text, "blocks of attention drawn by NumPy", {**TEXT_ENCODER, **sparse}
    hashed = {"num_hash_buckets": 16, "num_hash_functions": 4, "local_transformer_stride": 4}
    hashed |= {"downsampling_rate": 4, "upsampling_kernel_size": 2}
    yield "Canine", "ForSequenceClassification", text, "hashed embeddings, one layer twice", {**TEXT_ENCODER, **hashed}
    ngrams = {name: SEQ2SEQ[name] for name in SEQ2SEQ if name.endswith("ffn_dim") or name == "vocab_size"}
    ngrams |= {f"num_{part}_{what}": size for part in ("encoder", "decoder") for what, size in
               {"layers": 2, "attention_heads": 4}.items()}  # fmt: skip
    ngrams |= {"hidden_size": 32, "max_position_embeddings": 64, "ngram": 2, "use_cache": False}
    yield "ProphetNet", "ForConditionalGeneration", two_texts, "several streams over the same layers", ngrams
    switch = {**T5_LIKE, "vocab_size": VOCABULARY, "num_experts": 4, "num_sparse_encoder_layers": 1}
    switch |= {"num_sparse_decoder_layers": 1, "decoder_start_token_id": 0, "use_cache": False}
    yield "SwitchTransformers", "ForConditionalGeneration", two_texts, "one expert for each token", switch
    latents = {"vocab_size": VOCABULARY, "d_latents": 16, "d_model": 32, "num_latents": 4, "num_blocks": 2}
    latents |= {"num_self_attends_per_block": 2, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    latents |= {"qk_channels": 16, "v_channels": 16, "max_position_embeddings": 16}
    yield "Perceiver", "ForMaskedLM", latent_text, "latents as raw parameters, blocks again and again", latents


def further_other_families() -> Iterator[tuple[str, str, Callable[[int], Any], str, dict[str, Any]]]:
    """Of sound, series, pictures and games."""
    yield "Informer", "ForPrediction", series, "a series, queries drawn at random", {**SERIES, "d_model": 16}
    decisions = {"state_dim": 5, "act_dim": 3, "hidden_size": 32, "max_ep_len": 20, "n_layer": 3, "n_head": 4}
    yield "DecisionTransformer", "Model", moves, "states, actions and rewards", {**decisions, "n_positions": 64}
    yield "Hubert", "ForCTC", sound, "layers skipped at random", {**SPEECH, "layerdrop": 0.3}
    buckets = {"num_buckets": 8, "max_bucket_distance": 16, "layerdrop": 0.0}
    yield "WavLM", "ForCTC", sound, "relative positions of the first layer used by all", {**SPEECH, **buckets}
    codes = {"num_filters": 4, "hidden_size": 16, "codebook_size": 16, "codebook_dim": 16, "num_residual_layers": 1}
    codes |= {"upsampling_ratios": [4, 2], "num_lstm_layers": 1, "target_bandwidths": [1.5], "sampling_rate": 1600}
    yield "Encodec", "Model", waveform, "LSTM, weight norm, codebooks", codes
    yield "Vits", "Model", text, "flows, weight norm, noise in forward", {**VOICE, "vocab_size": VOCABULARY}
    yield "SpeechT5", "ForTextToSpeech", speech_and_speaker, "nets before and behind shared layers", SPEAKING
    texts = {**TEXT_ENCODER, "projection_dim": 16}
    sounds = {"text_config": texts, "audio_config": {**SOUNDS, "num_hidden_layers": 2, "enable_fusion": False}}
    yield "Clap", "Model", spectrum_and_caption, "two towers, batch norm first", {**sounds, "projection_dim": 16}
    boxes = {"text_config": {**TEXT_ENCODER, "max_position_embeddings": 16}, "vision_config": VISION}
    yield "OwlViT", "ForObjectDetection", picture_and_queries, "boxes from two towers", {**boxes, "projection_dim": 32}
    tower = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": IMAGE, "mlp_dim": 24}
    tower |= {"patch_size": 4, "output_channels": 16, "window_size": 4, "global_attn_indexes": [1], "num_pos_feats": 8}
    prompts = {"hidden_size": 16, "image_size": IMAGE, "patch_size": 4, "mask_input_channels": 8}
    masks = {"hidden_size": 16, "mlp_dim": 24, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    sam = {"vision_config": tower, "prompt_encoder_config": prompts, "mask_decoder_config": masks}
    yield "Sam", "Model", picture_and_points, "positions shared by tower and prompts", sam
    beit = {**VISION, "use_shared_relative_position_bias": True, "drop_path_rate": 0.3}
    yield "Beit", "ForImageClassification", picture, "relative positions shared, paths dropped", beit
    levit = {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2] * 3, "depths": [1] * 3}
    yield "Levit", "ForImageClassification", large_picture, "batch norm in attention", {**levit, "key_dim": [8] * 3}
    segments = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    segments |= {"patch_sizes": [3, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    segments |= {"decoder_hidden_size": 16, "num_labels": 3}
    yield "Segformer", "ForSemanticSegmentation", picture, "stages read by the head", segments
    detection = {"backbone_config": DETECTION, "encoder_hidden_dim": 16, "encoder_in_channels": [8, 16, 16]}
    detection |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_layers": 2, "num_queries": 5}
    detection |= {"decoder_in_channels": [16] * 3, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    detection |= {"num_labels": 3, "num_denoising": 0}
    yield "RTDetr", "ForObjectDetection", large_picture, "box heads shared with decoder layers", detection
    tubelets = {"image_size": IMAGE, "num_frames": 4, "tubelet_size": 2, "patch_size": 8}
    videos = {name: VISION[name] for name in VISION if name.endswith(("_size", "_layers", "_heads"))}
    yield "VideoMAE", "ForVideoClassification", unlabelled_video, "tubes of pixels", {**videos, **tubelets}


def further_families() -> Iterator[Family]:
    for source in (further_language_families, further_other_families):
        for stem, suffix, batch, special, settings in source():
            make = transformer(stem + suffix, f"{stem}Config", **settings)
            case = models.Case(stem.lower(), make, batch, spread, predictions, tags=frozenset({"transformers"}))
            yield Family(case, special)
    for name, net, batch, special in (
        ("tv_retinanet", retinanet, boxed_pictures, "one head over all levels of a pyramid"),
        ("tv_mvit", multiscale, positional((3, 4, IMAGE, IMAGE)), "pooled queries and keys, a video"),
    ):
        yield Family(models.Case(name, net, batch, spread, predictions, tags=frozenset({"torchvision"})), special)


def retinanet() -> nn.Module:
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import mobilenet_backbone

    backbone = mobilenet_backbone(
        backbone_name="mobilenet_v3_large", weights=None, fpn=True, trainable_layers=6, norm_layer=nn.BatchNorm2d
    )
    anchors = AnchorGenerator(((32, 64, 128),) * 3, ((0.5, 1.0, 2.0),) * 3)
    return RetinaNet(backbone, num_classes=3, min_size=IMAGE, max_size=IMAGE, anchor_generator=anchors)


def multiscale() -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    same, half = [1, 1, 1], [1, 2, 2]
    blocks = [
        MSBlockConfig(1, 16, 16, [3, 3, 3], [3, 3, 3], same, half),
        MSBlockConfig(2, 16, 32, [3, 3, 3], [3, 3, 3], half, same),
    ]
    return MViT((IMAGE, IMAGE), 4, blocks, True, False, True, True, num_classes=5)


FAMILIES: dict[str, Family] = {
    family.case.name: family
    for source in (transformers_families, torchvision_families, diffusion_families, further_families)
    for family in source()
}

"""That models train on the simulated device as they do on the CPU, bit for bit."""

import contextlib

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import simgpu

D = "simgpu"


def assert_same(run):
    expected, got = run("cpu"), run(D)
    assert len(expected) == len(got) > 0
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b.cpu())
    assert not simgpu.races()


def layer(name):
    g = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    qkv = [randn(2, 4, 9, 16) for _ in range(3)]
    sdpa = F.scaled_dot_product_attention

    def convs():
        first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=4)
        return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), second, nn.AdaptiveAvgPool2d(2))

    def mask(q):
        return torch.ones(9, 9, dtype=torch.bool, device=q.device).tril()

    def index(x):
        rows = x[torch.tensor([0, 2], device=x.device)].cumsum(1).sort(1)[0]
        return rows + x.topk(2, 0)[0] + torch.where(x[:2] > 0, x[:2], 0.5 * x[:2]).exp()

    def fft(x):
        conj = torch.view_as_complex(x.view(2, 4, 4, 2)).conj() * 2
        return torch.fft.rfft(x).abs() + torch.view_as_real(conj).flatten()[:5]

    def label(x):
        return F.cross_entropy(x, torch.arange(6, device=x.device) % 5, label_smoothing=0.1)

    return {
        "mlp": (
            lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)),
            [randn(4, 32)],
        ),
        "conv": (convs, [randn(2, 3, 16, 16)]),
        "conv_transpose": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), [randn(2, 3, 8, 8)]),
        "norms": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.InstanceNorm2d(4)), [randn(2, 4, 6, 6)]),
        "upsample": (lambda: nn.Upsample(scale_factor=2), [randn(2, 4, 6, 6)]),
        "embedding": (lambda: nn.Embedding(50, 16), [torch.randint(0, 50, (3, 7), generator=g)]),
        "dropout": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Dropout(0.37)), [randn(8, 16)]),
        "sdpa": (lambda: sdpa, qkv),
        "sdpa_causal": (lambda: lambda q, k, v: sdpa(q, k, v, is_causal=True), qkv),
        "sdpa_mask": (lambda: lambda q, k, v: sdpa(q, k, v, attn_mask=mask(q)), qkv),
        "sdpa_dropout": (lambda: lambda q, k, v: sdpa(q, k, v, dropout_p=0.2), qkv),
        "transformer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), [randn(2, 5, 16)]),
        "cross_entropy": (lambda: label, [randn(6, 5)]),
        "indexing": (lambda: index, [randn(5, 7)]),
        "data_dependent": (lambda: lambda x: x[x > 0] * 2, [randn(5, 7)]),
        "complex": (lambda: fft, [randn(8, 8)]),
        "views": (lambda: lambda x: torch.stack(x.unbind(0)[:2]) + torch.cat(x.chunk(2, 1), 1)[:2], [randn(4, 6)]),
    }[name]


LAYERS = "mlp conv conv_transpose norms upsample embedding dropout sdpa sdpa_causal sdpa_mask sdpa_dropout transformer"
LAYERS += " cross_entropy indexing data_dependent complex views"


def train_layer(make, inputs, device):
    torch.manual_seed(0)
    m = make()
    m = m.to(device) if isinstance(m, nn.Module) else m
    out = []
    for _ in range(3):
        xs = [x.clone().to(device).requires_grad_(x.is_floating_point()) for x in inputs]
        torch.manual_seed(7)
        y = m(*xs)
        y = y[0] if isinstance(y, tuple) else y
        y.pow(2).sum().backward()
        out += [y.detach(), *(x.grad for x in xs if x.grad is not None)]
        out += [p.grad.clone() for p in m.parameters()] if isinstance(m, nn.Module) else []
    return out


@pytest.mark.parametrize("name", LAYERS.split())
def test_layer(name):
    assert_same(lambda device: train_layer(*layer(name), device))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bias", [False, True])
def test_recurrent_layer_is_close(kind, bias):
    def make():
        return kind(8, 8, 2, bias=bias, batch_first=True)

    inputs = [torch.randn(3, 5, 8)]
    for a, b in zip(train_layer(make, inputs, "cpu"), train_layer(make, inputs, D), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kwargs", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_optimizer(kwargs):
    def run(device):
        torch.manual_seed(0)
        m = nn.Linear(8, 8).to(device)
        o = torch.optim.AdamW(m.parameters(), lr=0.1, **kwargs)
        for i in range(4):
            o.zero_grad()
            m(torch.ones(2, 8, device=device) * i).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            o.step()
        return [p.detach() for p in m.parameters()]

    assert_same(run)


def language_model(name):
    T = pytest.importorskip("transformers")
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text, image = {"vocab_size": 128, **layers}, {"image_size": 32, "patch_size": 8, **layers}
    ids, g = torch.arange(24).view(2, 12), torch.Generator().manual_seed(0)
    pixels, sound = torch.randn(2, 3, 32, 32, generator=g), torch.randn(2, 8, 40, generator=g)
    batch = {"input_ids": ids, "labels": ids}
    torch.manual_seed(0)
    if name == "llama":
        model = T.LlamaForCausalLM(T.LlamaConfig(**text, num_key_value_heads=2))
    if name == "mixtral":
        experts = {"num_local_experts": 4, "experts_implementation": "eager"}
        model = T.MixtralForCausalLM(T.MixtralConfig(**text, num_key_value_heads=2, **experts))
    if name == "gpt2":
        model = T.GPT2LMHeadModel(T.GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=4))
    if name == "bert":
        model = T.BertForMaskedLM(T.BertConfig(**text))
    if name == "t5":
        sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        model = T.T5ForConditionalGeneration(T.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))
    if name == "vit":
        model = T.ViTForImageClassification(T.ViTConfig(**image))
        batch = {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    if name == "clip":
        text |= {"max_position_embeddings": 16, "eos_token_id": 127, "bos_token_id": 0}
        model = T.CLIPModel(T.CLIPConfig(text_config=text, vision_config=image, projection_dim=16))
        batch = {"input_ids": ids, "pixel_values": pixels, "return_loss": True}
    if name == "whisper":
        sizes = {"vocab_size": 128, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 20}
        for side in ("encoder", "decoder"):
            sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        model = T.WhisperForConditionalGeneration(T.WhisperConfig(**sizes, **tokens, max_target_positions=16))
        batch = {"input_features": sound, "labels": ids[:, :10]}
    return model, batch


MODELS = [(name, False, False) for name in ["llama", "gpt2", "bert", "t5", "vit", "clip", "whisper", "mixtral"]]


@pytest.mark.parametrize("name, autocast, checkpointing", [*MODELS, ("llama", True, False), ("llama", False, True)])
def test_transformers(name, autocast, checkpointing):
    def run(device):
        m, batch = language_model(name)
        m.train().to(device)
        if checkpointing:
            m.gradient_checkpointing_enable()
        batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
        o, losses = torch.optim.AdamW(m.parameters(), 1e-2), []
        for step in range(2):
            torch.manual_seed(step)
            with torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = m(**batch).loss
            o.zero_grad()
            loss.backward()
            o.step()
            losses.append(loss.detach())
        return losses + [p.detach() for p in m.parameters()]

    assert_same(run)


@pytest.mark.parametrize("name", ["resnet18", "vit", "swin"])
def test_torchvision(name):
    models = pytest.importorskip("torchvision.models")

    def swin():
        return models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=4, stochastic_depth_prob=0.2)

    make, size = {
        "resnet18": (lambda: models.resnet18(num_classes=4), 64),
        "vit": (lambda: models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=4), 32),
        "swin": (swin, 64),
    }[name]

    def run(device):
        torch.manual_seed(0)
        m, g = make().to(device), torch.Generator().manual_seed(0)
        x = torch.randn(2, 3, size, size, generator=g).to(device)
        o = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(2):
            torch.manual_seed(1)
            o.zero_grad()
            F.cross_entropy(m(x), torch.tensor([0, 1], device=device)).backward()
            o.step()
        return list(m.state_dict().values())

    assert_same(run)

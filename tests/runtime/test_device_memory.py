"""What is on the device at most, term by term: each is derived from the model, none from the run that it predicts."""

from __future__ import annotations

import gc
import importlib

import lightning as L
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import parity
import simgpu
import sp_lightning
from sp_lightning.core.unit_numbers import aligned

DEVICE = torch.device("simgpu", 0)
BATCH, LENGTH, WIDTH, VOCABULARY, BLOCKS = 4, 32, 64, 128, 8
HIDDEN = BATCH * LENGTH * WIDTH * 4  # bytes of what one block hands to the next
STEPS = 3


def llama(blocks):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=176,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


class LanguageModel(L.LightningModule):
    def __init__(self, blocks):
        super().__init__()
        self.net = llama(blocks)

    def training_step(self, batch, batch_index):
        output = self.net(input_ids=batch, labels=batch)
        return {"loss": output.loss, "logits": output.logits}  # which keeps the logits while backward runs

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=False)


class WhatIsOnTheDevice(L.Callback):
    """Bytes of parameters, gradients and optimizer state that are on the device when a step is done, by parameter."""

    def __init__(self):
        self.nbytes = {}

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        for name, parameter in pl_module.named_parameters():
            tensors = [parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()]
            on_device = [t for t in tensors if isinstance(t, torch.Tensor) and t.device == DEVICE and t.dim()]
            self.nbytes[name] = max(self.nbytes.get(name, 0), sum(aligned(t.nbytes) for t in on_device))

    def of_blocks(self):
        return sum(nbytes for name, nbytes in self.nbytes.items() if ".layers." in name)

    def of_the_rest(self):
        return sum(self.nbytes.values()) - self.of_blocks()


def fit(blocks, strategy, *callbacks, capacity=None):
    """Trains, and returns the peak. The device has room for `capacity` bytes."""
    importlib.import_module("simgpu.lightning")
    module = LanguageModel(blocks)
    random = torch.Generator().manual_seed(0)
    batches = [torch.randint(VOCABULARY, (BATCH, LENGTH), generator=random) for _ in range(STEPS)]
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="simgpu",
        devices=1,
        max_steps=STEPS,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.accelerator.reset_peak_memory_stats()
    if capacity is not None:
        simgpu.config.capacity = capacity
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    assert trainer.global_step == STEPS
    return torch.accelerator.max_memory_allocated()


def streaming(window):
    return parity.streaming_strategy("simgpu", window=window, activations="recompute")


def weights(module):
    """Bytes of a module's weights, each allocated by itself."""
    return sum(aligned(parameter.nbytes) for parameter in module.parameters())


def activations_of_one_block():
    """What a block that is recomputed has on the device at most, beside its input, its weights and their gradients."""
    model = llama(1).model
    block = model.layers[0].to(DEVICE)
    hidden = torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE, requires_grad=True)
    positions = model.rotary_emb.to(DEVICE)(hidden, torch.arange(LENGTH, device=DEVICE)[None])
    before = torch.accelerator.memory_allocated()
    output = checkpoint(block, hidden, position_embeddings=positions, use_reentrant=False)
    gradient, edge = torch.ones_like(output), torch.autograd.graph.get_gradient_edge(output)
    del output
    torch.accelerator.reset_peak_memory_stats()
    torch.autograd.backward(edge, gradient)
    return torch.accelerator.max_memory_allocated() - before - sum(p.grad.nbytes for p in block.parameters())


def terms(blocks, window):
    net = llama(blocks)
    block = weights(net.model.layers[0])
    root = weights(net) - blocks * block
    return {
        "window": window * block,
        "two gradient buffers": 2 * block,
        "resident root": root + weights(net.lm_head),  # whose gradient waits for the embedding's
        "activations of one block": activations_of_one_block(),
        "block inputs": blocks * HIDDEN,
        "logits and loss": aligned(BATCH * LENGTH * VOCABULARY * 4) + aligned(4),
        "batch": aligned(BATCH * LENGTH * 8),
    }


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.few(1)
def test_training_fits_into_the_sum_of_its_terms(window):
    capacity = sum(terms(BLOCKS, window).values())
    peak = fit(BLOCKS, streaming(window), capacity=capacity)
    assert 0.98 * capacity <= peak <= capacity


@pytest.mark.parametrize("term", ["window", "two gradient buffers", "activations of one block", "block inputs"])
@pytest.mark.few(1)
def test_no_term_is_there_for_nothing(term):
    named = terms(BLOCKS, window=2)
    with pytest.raises(torch.OutOfMemoryError):
        fit(BLOCKS, streaming(2), capacity=sum(named.values()) - named[term])


@pytest.fixture(scope="module")
def plain_bytes():
    plain = WhatIsOnTheDevice()
    fit(24, parity.plain_strategy("simgpu"), plain)
    return plain


@pytest.mark.seldom
def test_of_embedding_and_head_weights_and_gradients_are_on_the_device_and_no_optimizer_state(plain_bytes):
    ours = WhatIsOnTheDevice()
    strategy = streaming(2)
    fit(24, strategy, ours)
    rest = weights(llama(1)) - weights(llama(1).model.layers[0])
    assert plain_bytes.of_the_rest() == 4 * rest
    assert sum(ours.nbytes.values()) == 0  # between steps; within, one copy of its weights and one of its gradients
    with sp_lightning.stream(llama(24), DEVICE, window=2) as handle:
        assert handle.stats()["resident_root_bytes"] == rest


def texts(step):
    return {"input_ids": torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(step))}


def pictures(step):
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(step))}


def vit():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 176, "num_hidden_layers": BLOCKS, "num_attention_heads": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=16, **sizes))


def frozen():
    net = llama(BLOCKS)
    net.requires_grad_(False)
    net.model.layers[0].input_layernorm.requires_grad_(True)  # gradients go through all blocks
    return net


def convolutions():
    blocks = [torch.nn.Sequential(torch.nn.Conv2d(48, 48, 3, padding=1), torch.nn.ReLU()) for _ in range(BLOCKS)]
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 48, 1), *blocks)
    net.forward = lambda pixel_values: torch.nn.Sequential.forward(net, pixel_values[..., :4, :4])
    return net


MODELS = {"llama": (lambda: llama(BLOCKS), texts), "frozen": (frozen, texts), "vit": (vit, pictures)}
MODELS["convolutions"] = (convolutions, pictures)


def peaks(name, dtype, **options):
    """The peaks of the first steps under autocast, of the device and of page-locked memory, and what the first may
    take more: the bytes of the largest unit, and those that the resident root takes less once its matrices are cast."""
    gc.collect()  # page-locked memory of other tests
    make, batch = MODELS[name]
    net, found, pinned = make(), [], []
    with sp_lightning.stream(net, DEVICE, **options) as handle:
        unit = max(sum(aligned(p.nbytes) for _, p in unit.params) for unit in handle.units)
        root = handle.stats()["resident_root_bytes"]
        optimizer = torch.optim.SGD(net.parameters(), 0.01, foreach=False)
        for step in range(4):
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            simgpu._C.reset_peak_stats()
            with torch.autocast("simgpu", dtype=dtype, cache_enabled=False):
                output = net(**{key: value.to(DEVICE) for key, value in batch(step).items()})
                loss = getattr(output, "logits", output).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del output, loss
            torch.accelerator.synchronize()
            found.append(torch.accelerator.max_memory_allocated())
            pinned.append(simgpu.pinned_bytes()[1])
        return found, pinned, unit, root - handle.stats()["resident_root_bytes"]


@parity.product(activations=["keep", "recompute", "offload"], window=[1, 2, 4], name=list(MODELS))
@pytest.mark.few(1)
def test_no_step_takes_more_than_the_steady_one_and_one_unit(name, window, activations):
    dtype = torch.float16 if window == 2 else torch.bfloat16
    found, pinned, unit, of_root = peaks(name, dtype, window=window, activations=activations)
    more = unit + of_root
    assert max(found) <= found[-1] + more, [round((peak - found[-1]) / more, 2) for peak in found]
    assert pinned[-1] > 0 and max(pinned) <= pinned[-1] + unit, [peak - pinned[-1] for peak in pinned]

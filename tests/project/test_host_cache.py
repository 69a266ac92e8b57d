"""A cache that waits on the host gives the tokens of plain ``generate``, and takes as much memory for any depth."""

from __future__ import annotations

import pytest
import torch

import sp_lightning
from sp_lightning.errors import OptionError
from sp_lightning.plan.machines import MACHINES

transformers = pytest.importorskip("transformers")
from examples.common.host_cache import HostCache, host_cache, on_host  # noqa: E402

pytestmark = pytest.mark.simgpu
DEVICE = torch.device("simgpu", 0)
TOKENS, ROWS, LENGTH = 12, 8, 48
SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "pad_token_id": 0}
KINDS = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "sliding window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 16}),
    "some sliding": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16}),
    "neox": ("GPTNeoX", {}),
}
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7},
    "beams": {"do_sample": False, "num_beams": 3},
}


def make(kind, layers):
    torch.manual_seed(0)
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes}, num_hidden_layers=layers)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def generate(net, cache=None, **how):
    """The tokens, and the device's peak."""
    ids = torch.randint(3, 128, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    torch.manual_seed(1)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    made = net.generate(input_ids=ids, attention_mask=mask, max_new_tokens=TOKENS, past_key_values=cache, **how).cpu()
    torch.accelerator.synchronize()
    return made, torch.accelerator.max_memory_allocated()


def streamed(kind, layers, cache=None, **how):
    net = make(kind, layers)
    with sp_lightning.stream(net, DEVICE, window=2):
        return generate(net, cache(net.config) if cache else None, **how)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(1)
def test_the_tokens_are_those_of_plain_generate(kind, way):
    expected, _ = generate(make(kind, 4).to(DEVICE), **WAYS[way])
    found, _ = streamed(kind, 4, host_cache, **WAYS[way])
    assert torch.equal(found, expected)


def test_so_they_are_without_streaming_and_with_a_cache_of_fixed_length():
    def fixed(config):
        return on_host(transformers.StaticCache(config=config, max_cache_len=LENGTH + TOKENS))

    expected, _ = generate(make("llama", 4).to(DEVICE), **WAYS["greedy"])
    net = make("llama", 4)
    assert torch.equal(generate(net.to(DEVICE), fixed(net.config), **WAYS["greedy"])[0], expected)
    assert torch.equal(streamed("llama", 4, fixed, **WAYS["greedy"])[0], expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.seldom
def test_the_peak_does_not_grow_with_the_layers_caches(way):
    (_, few), (_, many) = (streamed("llama", layers, host_cache, **WAYS[way]) for layers in (4, 16))
    (_, few_there), (_, many_there) = (streamed("llama", layers, **WAYS[way]) for layers in (4, 16))
    assert many_there > few_there
    assert many <= few + 1024


@pytest.mark.parametrize(
    "prompt, answer, on_host",
    [
        (64, 4, False),
        (4, 44, True),
        pytest.param(64, 4, True, marks=pytest.mark.slow),
        pytest.param(4, 44, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.seldom
def test_a_planned_peak_is_that_of_a_run(prompt, answer, on_host):
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=8, vocab_size=128, pad_token_id=0)
    net, ids = transformers.LlamaForCausalLM(config).eval(), torch.full((32, prompt), 3, device=DEVICE)
    with sp_lightning.stream(net, DEVICE, window=2):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        cache = host_cache(config) if on_host else None
        net.generate(ids, min_new_tokens=answer, max_new_tokens=answer, do_sample=False, past_key_values=cache)
        torch.accelerator.synchronize()
    planned = plan_of(config, ids, answer=answer, cache="host" if on_host else "device")
    assert torch.accelerator.max_memory_allocated() == pytest.approx(planned.device_nbytes, rel=0.05)
    assert planned.host.keys_and_values == on_host * 8 * 2 * 32 * (prompt + answer) * 32 * 4


def plan_of(config, ids, **answers):
    machine = MACHINES["rtx3060"]
    return sp_lightning.plan(
        lambda: transformers.LlamaForCausalLM(config),
        {"input_ids": ids.cpu()},
        **(answers | {"machine": machine, "device": "simgpu", "window": 2, "transfer": 1}),
    )


@pytest.mark.seldom
def test_a_plan_has_room_for_more_rows_with_the_cache_on_the_host():
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=16, num_key_value_heads=4)
    ids = torch.ones(64, LENGTH, dtype=torch.long)
    there, away = (plan_of(config, ids, answer=64, cache=cache, device_memory="64MiB") for cache in ("device", "host"))
    assert there.device_terms["keys and values"] > 4 * away.device_terms["keys and values"]
    assert away.largest_batch > 3 * there.largest_batch
    offered = [change for change in there.changes if change.what.startswith("cache='host'")]
    assert [change.nbytes for change in offered] == [away.device_nbytes]
    assert there.host.gradients == there.host.optimizer == there.trained == 0


@pytest.mark.parametrize("kind", ["Qwen3Next", "Mamba"])
def test_a_plan_refuses_a_cache_that_cannot_wait_on_the_host(kind):
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=4, vocab_size=64, hidden_size=64)
    with pytest.raises(OptionError, match="cache must be 'device': the layers keep more than keys and values"):
        sp_lightning.plan(
            lambda: getattr(transformers, f"{kind}ForCausalLM")(config),
            {"input_ids": torch.ones(2, 8, dtype=torch.long)},
            answer=8,
            cache="host",
            machine="rtx4090",
        )


def test_at_most_three_layers_are_on_the_device():
    net, cache, seen = make("llama", 8), None, []

    def count(*_):
        there = [layer for layer in cache.layers if layer.is_initialized and layer.keys.device == DEVICE]
        seen.append(len(there) + len(cache._leaving))

    with sp_lightning.stream(net, DEVICE, window=2):
        cache = host_cache(net.config)
        hooks = [block.register_forward_hook(count) for block in net.model.layers]
        generate(net, cache, **WAYS["greedy"])
        for hook in hooks:
            hook.remove()
    assert max(seen) == 3 and len(cache.layers) == 8


def test_waiting_layers_are_page_locked():
    net = make("llama", 4)
    with sp_lightning.stream(net, DEVICE, window=2):
        cache = host_cache(net.config)
        generate(net, cache, **WAYS["greedy"])
    waiting = [layer for layer in cache.layers if layer.keys.device.type == "cpu"]
    assert len(waiting) >= 2 and all(layer.keys.is_pinned() and layer.values.is_pinned() for layer in waiting)


def test_on_the_cpu_it_is_the_plain_cache():
    net = make("llama", 3)
    ids = torch.arange(3, 11)[None]
    expected = net.generate(input_ids=ids, max_new_tokens=TOKENS, do_sample=False)
    cache = host_cache(net.config)
    assert torch.equal(
        net.generate(input_ids=ids, max_new_tokens=TOKENS, do_sample=False, past_key_values=cache), expected
    )
    assert isinstance(cache, HostCache) and isinstance(cache, transformers.DynamicCache)


def test_layers_that_keep_more_than_keys_are_refused():
    config = transformers.Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match="cannot wait on the host"):
        host_cache(config)

"""Calls of transformers' `generate` in lockstep: speculation, caches, and other kinds of models."""

from __future__ import annotations

import functools
import time

import pytest
import torch
from speeds import measured_again
from torch import nn

import sp_lightning

transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 41}
LENGTHS = ((5, 24), (17, 9), (9, 30), (3, 24))  # tokens of the prompt, and new ones


def llama(layers=4, seed=0, **options):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, **TINY, **options)).eval()


def repeating(device):
    """Prompts with pieces that come again, as prompt lookup needs them."""
    numbers = torch.Generator().manual_seed(1)
    pieces = [torch.randint(41, (1, (length + 1) // 2), generator=numbers) for length, _ in LENGTHS]
    return [torch.cat([piece, piece], dim=1).to(device) for piece in pieces]


def generations(model, device, prompts=None, **how):
    options = {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True, "do_sample": False, **how}

    def call(prompt, new):
        made = {
            name: value() if callable(value) and not isinstance(value, nn.Module) else value
            for name, value in options.items()
        }
        return model.generate(prompt, max_new_tokens=new, **made)

    prompts = repeating(device) if prompts is None else prompts
    return [functools.partial(call, prompt, new) for prompt, (_, new) in zip(prompts, LENGTHS, strict=True)]


def bits(output):
    return [output.sequences, *output.logits]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def fetched(handle, run):
    before = handle.stats()["fetches"]
    result = run()
    return result, handle.stats()["fetches"] - before


def streamed(handle):
    return sum(not unit.resident for unit in handle.units)


# --- Speculation


def forwards_of(model):
    """Count the forwards of a model; a hook that counts would be something that calls change."""
    counted, forward = [0], model.forward

    @functools.wraps(forward)
    def counting(*args, **settings):
        counted[0] += 1
        return forward(*args, **settings)

    model.forward = counting
    return counted


SPECULATION = {
    "prompt lookup": lambda device: {"prompt_lookup_num_tokens": 4},
    "a draft that guesses all": lambda device: {"assistant_model": llama().to(device)},  # the target itself
    "a draft that guesses little": lambda device: {"assistant_model": llama(1, seed=5).to(device)},
}


@pytest.mark.parametrize("name", SPECULATION)
@pytest.mark.parametrize(
    "at_once", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.seldom
def test_speculation_is_exact_and_brings_weights_up_once_for_all_tokens_of_a_guess(name, at_once, device):
    how, model = SPECULATION[name](device), llama()
    forwards = forwards_of(model)
    # As many tokens of a guess as in the runs before: transformers adapts it to what was accepted, and remembers.
    if "assistant_model" in how:
        how["assistant_model"].generation_config.num_assistant_tokens_schedule = "constant"
        how["assistant_model"].generation_config.assistant_confidence_threshold = 0.0
    with sp_lightning.stream(model, device, window=2) as handle:
        plain = [bits(call())[0] for call in generations(model, device)]
        before = forwards[0]
        alone, trips = fetched(handle, lambda: [call() for call in generations(model, device, **how)])
        ran = forwards[0] - before
        together, shared = fetched(handle, lambda: handle.lockstep(generations(model, device, **how), at_once))
    assert all(torch.equal(output.sequences, sequence) for output, sequence in zip(alone, plain, strict=True))
    assert all(same(bits(found), bits(expected)) for found, expected in zip(together, alone, strict=True))
    tokens, units = sum(new for _, new in LENGTHS), streamed(handle)
    assert trips == pytest.approx(ran * units, rel=0.02, abs=3)  # a trip for each forward, whatever was accepted
    if name == "a draft that guesses all":
        assert ran < tokens / 4
    if at_once == 1:
        assert shared == pytest.approx(trips, rel=0.02, abs=3)
    else:
        assert shared < 0.75 * trips


# --- Caches


def dynamic(model):
    return transformers.DynamicCache(config=model.config)


def static(model):
    return transformers.StaticCache(config=model.config, max_cache_len=64)


CACHES = {
    "dynamic": dynamic,
    "static": static,
    "offloaded": lambda model: transformers.DynamicCache(config=model.config, offloading=True),
    "offloaded static": lambda model: transformers.StaticCache(config=model.config, max_cache_len=64, offloading=True),
    "quantised": lambda model: transformers.QuantizedCache(
        backend="hqq", config=model.config, nbits=4, axis_key=1, axis_value=1, q_group_size=8, residual_length=4
    ),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.seldom
def test_calls_with_caches_of_their_own_have_the_bits_of_each_alone(name, device):
    if name == "quantised":
        pytest.importorskip("hqq")
    if name.startswith("offloaded") and not torch.cuda.is_available():
        pytest.skip("transformers moves an offloaded cache on CUDA's streams")
    model = llama()
    how = {"past_key_values": lambda: CACHES[name](model)}
    with sp_lightning.stream(model, device, window=2) as handle:
        alone = [bits(call()) for call in generations(model, device, **how)]
        together = [bits(output) for output in handle.lockstep(generations(model, device, **how), at_once=3)]
    assert all(map(same, together, alone))


@pytest.mark.seldom
def test_a_sliding_window_s_cache_has_the_bits_of_each_alone(device):
    torch.manual_seed(0)
    config = transformers.MistralConfig(num_hidden_layers=4, num_key_value_heads=2, sliding_window=8, **TINY)
    model = transformers.MistralForCausalLM(config).eval()
    with sp_lightning.stream(model, device, window=2) as handle:
        alone = [bits(call()) for call in generations(model, device)]
        together = [bits(output) for output in handle.lockstep(generations(model, device), at_once=3)]
    assert all(map(same, together, alone))


# --- Other kinds of models


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=41)
    config.decoder_start_token_id = config.pad_token_id = 0
    return transformers.T5ForConditionalGeneration(config).eval()


def mixture():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        num_hidden_layers=3,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=1,
        experts_implementation="eager",
        **TINY,
    )
    return transformers.MixtralForCausalLM(config).eval()


def adapted():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(llama(), lora).eval()


KINDS = {"encoder and decoder": t5, "mixture of experts": mixture, "adapters": adapted}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 8}], ids=str)
@pytest.mark.seldom
def test_other_kinds_of_models_have_the_bits_of_each_alone(name, how, device):
    model = KINDS[name]()

    def calls():
        made = generations(model, device, **how)
        return [functools.partial(seeded, number, call) for number, call in enumerate(made)]

    def seeded(number, call):
        torch.manual_seed(number)
        return bits(call())

    if name == "adapters":  # peft's generate takes its inputs by name
        generate = model.generate
        model.generate = lambda prompt, **options: generate(input_ids=prompt, **options)
    with sp_lightning.stream(model, device, window=2) as handle:
        alone = [call() for call in calls()]
        together = handle.lockstep(calls(), at_once=3)
    assert all(map(same, together, alone))


# --- Traffic and time


def equal_calls(model, device, new):
    numbers = torch.Generator().manual_seed(1)
    prompts = torch.randint(41, (8, 1, 5), generator=numbers).to(device)
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return [functools.partial(model.generate, prompt, **how) for prompt in prompts]


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.seldom
def test_bytes_of_weights_for_a_token_fall_by_the_calls_at_once(count, device):
    model = llama()
    with sp_lightning.stream(model, device, window=2) as handle:
        calls = equal_calls(model, device, new=60)[:count]
        before = handle.stats()["bytes_up"]
        alone = [call() for call in calls]
        middle = handle.stats()["bytes_up"]
        together = handle.lockstep(calls, at_once=count)
        end = handle.stats()["bytes_up"]
    assert same(together, alone)
    assert (middle - before) / (end - middle) == pytest.approx(count, rel=0.02)


@pytest.mark.simgpu
@measured_again
@pytest.mark.seldom
def test_eight_calls_give_five_times_the_tokens_a_second_of_one_where_the_link_binds():
    import simgpu

    model, device = llama(layers=3), torch.device("simgpu", 0)
    with sp_lightning.stream(model, device, window=1, transfer=1) as handle:
        calls = equal_calls(model, device, new=4)
        handle.lockstep(calls)  # the first call of an operator blocks the host
        layer = sum(p.nbytes for p in model.model.layers[0].parameters())
        simgpu.config.h2d_gbps = layer / 1e9 / 0.1  # a tenth of a second for a unit
        begin = time.perf_counter()
        calls[0]()
        middle = time.perf_counter()
        handle.lockstep(calls, at_once=8)
        end = time.perf_counter()
        simgpu.config.h2d_gbps = 0
    assert middle - begin > 4 * 3 * 0.1 * 0.9  # it binds
    assert 8 * (middle - begin) / (end - middle) >= 5

"""Calls in lockstep: each has the bits of the call alone, and they share the trips of the weights (lockstep.py)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import random
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from families import FAMILIES, predictions
from side_by_side import assert_plain, blocks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import models
import parity
import sp_lightning
from sp_lightning.compat.references import python_numbers
from sp_lightning.errors import OptionError, UnsupportedError

transformers = pytest.importorskip("transformers")

LENGTHS = ((2, 5, 12), (1, 17, 7), (3, 9, 20), (1, 3, 12), (2, 7, 6))  # texts, their tokens, and new tokens
OFTEN = {"qwen3", "deepseek_v3", "mamba", "whisper", "paligemma", "tv_regnet", "tv_raft"}  # in the default run


@functools.cache
def decoder_config():
    config = transformers.LlamaConfig
    return config(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=97)


def decoder():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(decoder_config()).eval()


def generations(model, device, **how):
    """Calls of `generate` of unequal lengths."""
    numbers = torch.Generator().manual_seed(1)
    prompts = [torch.randint(97, (count, length), generator=numbers).to(device) for count, length, _ in LENGTHS]
    options = {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True, **how}

    def call(prompt, new):
        return lambda: model.generate(prompt, max_new_tokens=new, **options)

    return [call(prompt, new) for prompt, (_, _, new) in zip(prompts, LENGTHS, strict=True)]


def bits(output):
    return [output.sequences, *output.logits]


def same(found, expected):
    found, expected = list(found), list(expected)
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def squares_of(net, x):
    return lambda: net(x).square().sum()


# --- Bits and trips


@pytest.mark.parametrize(
    "at_once", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"do_sample": False}, id="greedy"),
        pytest.param({"do_sample": False, "num_beams": 3}, id="beams"),
        pytest.param({"do_sample": False, "cache_implementation": "static"}, id="static cache"),
        pytest.param({"do_sample": False, "use_cache": False}, id="no cache"),
    ],
)
@pytest.mark.seldom
def test_calls_of_generate_have_the_bits_of_each_alone(device, how, at_once):
    model = decoder()
    with sp_lightning.stream(model, device, window=2) as handle:
        for _ in range(2):  # the model remembers the longest static cache, for its later calls
            alone = [bits(call()) for call in generations(model, device, **how)]
        together = [bits(output) for output in handle.lockstep(generations(model, device, **how), at_once)]
    assert all(map(same, together, alone))
    assert_plain(model)


@pytest.mark.seldom
def test_calls_at_once_need_the_trips_of_the_longest_alone(device):
    model = decoder()
    with sp_lightning.stream(model, device, window=2) as handle:
        begin = handle.stats()["fetches"]
        generations(model, device)[2]()  # the longest
        middle = handle.stats()["fetches"]
        handle.lockstep(generations(model, device), at_once=5)
        again = handle.stats()["fetches"]
        handle.lockstep(generations(model, device), at_once=5)
        end = handle.stats()["fetches"]
        streamed = sum(not unit.resident for unit in handle.units)
        longest = LENGTHS[2][2] * streamed
    assert middle - begin == pytest.approx(longest, abs=3)  # the window begins and ends with some
    assert again - middle == pytest.approx(longest + streamed, abs=3)  # others begin when the first has shown itself
    assert end - again == pytest.approx(longest, abs=3)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.few(1)
def test_weights_travel_once_for_all_forwards_at_once(device, count):
    net, x = models.stack_of(models.Block, 8)(), torch.ones(2, 12, device=device)
    calls = [squares_of(net, x * number) for number in range(4 * count)]
    with sp_lightning.stream(net, device, window=2) as handle, torch.no_grad():
        alone = [call() for call in calls]
        handle.lockstep(calls[:1])  # shows that calls change nothing
        before = handle.stats()["bytes_up"]
        together = handle.lockstep(calls, at_once=count)
        travelled = handle.stats()["bytes_up"] - before
    assert same(together, alone)
    once = sum(p.nbytes for p in net.blocks.parameters())
    assert 4 * once <= travelled <= 4 * once * 1.3  # and what the window has fetched for a pass that does not come


@pytest.mark.parametrize(
    "name, at_once",
    [
        pytest.param(name, at_once, marks=[] if name in OFTEN and at_once == 3 else [pytest.mark.slow])
        for name in sorted(FAMILIES)
        for at_once in (2, 3, 8)
    ],
)
@pytest.mark.few(1)
def test_forwards_of_every_family_have_the_bits_of_each_alone(name, at_once, device):
    case = FAMILIES[name].case
    for library in case.tags:
        if library in ("transformers", "torchvision"):
            pytest.importorskip(library)
    torch.manual_seed(0)
    net = case.make().eval()

    def call(index):
        def run():
            torch.manual_seed(index)
            return predictions(net, tree_map_only(torch.Tensor, lambda t: t.to(device), case.batch(index)))

        return run

    with sp_lightning.stream(net, device, window=1, units=case.units) as handle, torch.no_grad():
        alone = [call(index)() for index in range(5)]
        together = handle.lockstep(map(call, range(5)), at_once)
    assert all(map(same, together, alone))


class Around(nn.Module):
    """Blocks inside a module with a weight of its own, which is read before and after them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, skip):
        x = x * self.scale
        for index, block in enumerate(self.blocks):
            if index != skip:
                x = block(x).tanh() * self.scale
        return x * self.scale


def test_a_call_may_wait_inside_of_another_unit_s_visit(device):
    torch.manual_seed(0)
    net = nn.Sequential(Around(), Around())
    net.forward = lambda x, skip: net[1](net[0](x, skip), skip)
    calls = [functools.partial(net, torch.full((2, 4), float(number), device=device), number) for number in range(4)]
    with sp_lightning.stream(net, device, window=1, units=["Linear", "Around"]) as handle, torch.no_grad():
        alone = [call() for call in calls]
        assert same(handle.lockstep(calls, at_once=3), alone)
        assert all(not unit.visits and not unit.stand_ins.bound for unit in handle.engine.units)
    assert_plain(net)


@pytest.mark.parametrize("inference", [False, True])
def test_calls_are_in_the_autocast_and_the_inference_mode_of_the_caller(device, inference):
    net, x = models.TokenStack(), torch.arange(6, device=device).reshape(2, 3)

    def call():
        assert torch.is_inference_mode_enabled() is inference and not torch.is_grad_enabled()
        return net(x)

    with sp_lightning.stream(net, device, window=1) as handle:
        mode = torch.inference_mode() if inference else torch.no_grad()
        with mode, torch.autocast(device.type, torch.bfloat16):
            alone = call()
            assert same(handle.lockstep([call] * 3), [alone] * 3)
        assert alone.dtype is torch.bfloat16


def test_calls_see_the_caller_s_context_variables(device):
    variable = contextvars.ContextVar("variable")
    variable.set(7)
    net = blocks()
    with sp_lightning.stream(net, device) as handle:
        assert handle.lockstep([variable.get] * 2) == [7, 7]


# --- Numbers drawn at random


def drawing(net, device):
    """A call that draws on the host and on the device, around a forward."""

    def call():
        x = torch.rand(2, 12).to(device)
        return net(x + torch.rand(2, 12, device=device)) + torch.rand(2, 5, device=device)

    return call


def test_what_calls_draw_depends_on_their_number_alone(device):
    net = blocks()
    with sp_lightning.stream(net, device, window=1) as handle:
        drawn, after = [], []
        for at_once in (1, 2, 5):
            torch.manual_seed(3)
            drawn.append(handle.lockstep([drawing(net, device)] * 5, at_once))
            after.append([torch.rand(3), torch.rand(3, device=device)])
    assert all(same(other, drawn[0]) for other in drawn) and all(same(other, after[0]) for other in after)
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_calls_that_draw_nothing_leave_the_generators_as_they_are(device):
    net, x = blocks(), torch.ones(2, 12, device=device)
    torch.manual_seed(3), random.seed(4), numpy.random.seed(5)
    before = parity.host_rng_states() | parity.device_rng_state(device)
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        handle.lockstep([functools.partial(net, x)] * 5, at_once=3)
    after = parity.host_rng_states() | parity.device_rng_state(device)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random, numpy.random.random])
def test_calls_draw_other_numbers_than_those_of_the_lockstep_before(draw, device):
    net, x = blocks(), torch.ones(2, 12, device=device)
    calls = [functools.partial(net, x), lambda: (net(x), draw())]
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        first, second = (handle.lockstep(calls, at_once=2)[1][1] for _ in range(2))
    assert first != second


def test_a_call_that_seeds_draws_what_it_draws_alone(device):
    net = blocks()

    def seeded(number):
        def call():
            torch.manual_seed(number)
            return drawing(net, device)()

        return call

    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        alone = [seeded(number)() for number in range(4)]
        assert same(handle.lockstep(map(seeded, range(4)), at_once=3), alone)


def drawing_anywhere(net, x, count):
    """A call that draws from Python's, NumPy's and torch's own generators, before, between and after its visits."""

    def numbers():
        # Of two normal numbers NumPy keeps the second one beside its generator's state.
        normal = [random.gauss(0, 1) for _ in range(count)]  # Python keeps the second one, too
        return [
            random.random(),
            *normal,
            numpy.random.random(),
            *numpy.random.standard_normal(count),
            float(torch.rand(())),
        ]

    def call():
        drawn = numbers()
        net(x)
        drawn += numbers()
        net(x)
        return drawn + numbers()

    return call


@pytest.mark.parametrize("known", [True, False], ids=["bytes", "tuples"])
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.few(1)
def test_python_s_and_numpy_s_generators_are_each_call_s_own(count, known, device, monkeypatch):
    if not known:
        monkeypatch.setattr(sp_lightning.calls.lockstep, "python_numbers", lambda: None)
    assert python_numbers() is not None
    net, x = blocks(), torch.ones(2, 12, device=device)
    calls = [drawing_anywhere(net, x, count) for count in (1, 2, 1, 3, 0)]
    with sp_lightning.stream(net, device, window=1) as handle:
        drawn, after = [], []
        for at_once in (1, 2, 5):
            torch.manual_seed(3), random.seed(4), numpy.random.seed(5)
            numpy.random.standard_normal(count)
            drawn.append(handle.lockstep(calls, at_once))
            after.append([random.random(), numpy.random.standard_normal(), numpy.random.random()])
    random.seed(4), numpy.random.seed(5)
    numpy.random.standard_normal(count)
    assert after == [[random.random(), numpy.random.standard_normal(), numpy.random.random()]] * 3
    assert drawn == [drawn[0]] * 3 and drawn[0][0] != drawn[0][2]


# --- Settings of the process, and of threads

SETTINGS = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "determinism": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 2),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "all precisions": (
        lambda: torch.backends.fp32_precision,
        functools.partial(setattr, torch.backends, "fp32_precision"),
        "tf32",
    ),
    "cudnn": (
        lambda: torch.backends.cudnn.benchmark,
        functools.partial(setattr, torch.backends.cudnn, "benchmark"),
        True,
    ),
    "attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
    "threads": (torch.get_num_threads, torch.set_num_threads, 2),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.few(1)
def test_what_a_call_sets_holds_for_it_alone(name, device):
    get, choose, other = SETTINGS[name]
    net, x, before = blocks(), torch.ones(2, 12, device=device), SETTINGS[name][0]()

    def call(value):
        found = [get()]
        if value is not None:
            choose(value)
        for _ in range(2):
            net(x)
            found.append(get())
        return found

    calls = [functools.partial(call, value) for value in (None, other, before, None, other)]
    expected = [[before, value, value] for value in (before, other, before, before, other)]
    try:
        with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
            for at_once in (1, 2, 5):
                assert handle.lockstep(calls, at_once) == expected
                assert get() == before
                if device.type == "cpu":  # threads that begin at the same time, as a device's may, can undo it
                    with ThreadPoolExecutor(1) as pool:
                        assert pool.submit(get).result() == before
    finally:
        choose(before)


def test_calls_run_in_the_settings_of_the_caller(device):
    net = blocks().double()
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        torch.set_default_dtype(torch.float64)
        try:
            assert handle.lockstep([lambda: net(torch.ones(2, 12, device=device)).dtype] * 3) == [torch.float64] * 3
        finally:
            torch.set_default_dtype(torch.float32)


def test_autocast_that_a_call_enters_holds_for_it_alone(device):
    net, x = models.TokenStack(), torch.arange(6, device=device).reshape(2, 3)

    def call(dtype):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            return net(x)

    calls = [functools.partial(call, dtype) for dtype in (torch.bfloat16, None, torch.bfloat16, None)]
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        alone = [call() for call in calls]
        assert same(handle.lockstep(calls), alone)
        assert [output.dtype for output in alone[:2]] == [torch.bfloat16, torch.float32]


def test_an_autocast_that_decorates_a_forward_gives_each_call_its_own_back(device):
    """There is one for all calls, and it keeps what it restores."""

    class Casts(models.TokenStack):
        forward = torch.autocast(device.type, torch.bfloat16)(models.TokenStack.forward)

    net, x = Casts(), torch.arange(6, device=device).reshape(2, 3)
    around = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    def call(dtype):
        found = []
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            for _ in range(3):
                y = net(x).float().flatten(0, -2)
                found += [y @ y.T, torch.tensor(torch.is_autocast_cache_enabled())]
        return found

    calls = [functools.partial(call, dtype) for dtype in (torch.bfloat16, None, torch.bfloat16, None)]
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        with around:
            alone = [call() for call in calls]
            for at_once in (8, 2):
                assert all(map(same, handle.lockstep(calls, at_once=at_once), alone))
        assert not torch.is_autocast_enabled(device.type) and around.prev is False
    assert {alone[0][0].dtype, alone[1][0].dtype} == {torch.bfloat16, torch.float32}
    assert not {"prev", "prev_fastdtype", "prev_cache_enabled"} & vars(torch.autocast).keys()


# --- The threads


def call_threads():
    """The threads of this process that run calls, or wait for one."""
    return [thread for thread in threading.enumerate() if thread.name == "superpipeline-call"]


class Dispatching(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def noting(net, x, known):
    """A call that returns how many calls its thread ran before."""

    def call():
        known.calls = getattr(known, "calls", -1) + 1
        net(x)
        return known.calls

    return call


def ended(threads):
    """Whether these threads end soon."""
    for thread in threads:
        thread.join(10)
    return not any(thread.is_alive() for thread in threads)


def test_calls_run_in_threads_that_ran_calls_before(device):
    """Torch keeps for each thread what it made for a shape, and making it may take longer than a layer does."""
    net, x, known = blocks(), torch.ones(2, 12, device=device), threading.local()
    with sp_lightning.stream(net, device, window=1) as handle:
        before = set(call_threads())  # of models that were dropped
        counts = [count for _ in range(3) for count in handle.lockstep([noting(net, x, known)] * 10, at_once=4)]
        threads = set(call_threads()) - before
        assert counts.count(0) == len(threads) <= 4 and sum(1 + count for count in counts) > 100
    assert ended(threads)


@pytest.mark.parametrize(
    "choose",
    [
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.set_autocast_cache_enabled(False),
        lambda: torch.overrides.BaseTorchFunctionMode().__enter__(),
        lambda: Dispatching().__enter__(),
    ],
    ids=["autocast", "its type", "its cache", "function mode", "dispatch mode"],
)
def test_a_thread_in_which_a_call_left_settings_runs_no_other_call(choose, device):
    net, x, known = blocks(), torch.ones(2, 12, device=device), threading.local()

    def leaves():
        choose()
        known.left = True

    def calls():
        return net(x), hasattr(known, "left")

    with sp_lightning.stream(net, device, window=1) as handle:
        before = set(call_threads())
        ((plain, _),) = handle.lockstep([calls])
        handle.lockstep([leaves] * 4)
        for again, left in handle.lockstep([calls] * 8):
            assert torch.equal(again, plain) and again.dtype == torch.float32 and not left
        threads = set(call_threads()) - before
    assert ended(threads)


def test_a_call_that_has_ended_is_not_kept_by_its_thread(device):
    net, x = blocks(), torch.ones(2, 12, device=device)

    class Held:
        pass

    held = Held()
    gone, call = weakref.ref(held), lambda held=held: net(x)
    with sp_lightning.stream(net, device, window=1) as handle:
        handle.lockstep([call])
        del held, call
        gc.collect()
        deadline = time.monotonic() + 10
        while gone() is not None and time.monotonic() < deadline:  # its thread may be on its way out of it
            time.sleep(0.001)
        assert gone() is None


# --- Which module


@pytest.mark.few(1)
def test_a_module_s_calls_are_found_by_any_part_of_it(device):
    net, other = nn.Sequential(blocks(), nn.Identity()), blocks()
    x = torch.ones(2, 12, device=device)
    with sp_lightning.stream(net, device, window=1), sp_lightning.stream(other, device, window=1), torch.no_grad():
        expected = net(x)
        for part in (net, net[0], net[0].blocks[1], nn.ModuleList([net])):
            assert same(sp_lightning.lockstep(part, [lambda: net(x)] * 3, at_once=2), [expected] * 3)
        with pytest.raises(UnsupportedError, match="ModuleList, which is streamed in 2 parts"):
            sp_lightning.lockstep(nn.ModuleList([net, other]), [lambda: net(x)])
    with pytest.raises(UnsupportedError, match="Sequential, which is not streamed"):
        sp_lightning.lockstep(net, [lambda: net(x)])


# --- Between the ends of calls


def test_each_call_is_there_when_it_has_ended_and_begins_when_another_has(device):
    net, x = blocks(), torch.ones(2, 12, device=device)
    begun, ended = [], []

    def call(number, times):
        begun.append(number)
        return [net(x * number) for _ in range(times)][-1]

    def calls():
        for number, times in enumerate((3, 1, 1, 2, 1)):
            assert len(begun) <= len(ended) + 2
            yield functools.partial(call, number, times)

    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        alone = [net(x * number) for number in range(5)]
        for one in handle.calls_ended(calls(), at_once=2):
            assert torch.equal(one.result, alone[one.number]) and torch.is_grad_enabled() is False
            ended.append(one.number)
    assert sorted(ended) == [0, 1, 2, 3, 4] and ended[0] == 1


def test_user_code_between_calls_finds_weights_and_enters_no_unit(device):
    net, x = blocks(), torch.ones(2, 12, device=device)
    sums = [float(p.detach().sum()) for p in net.parameters()]
    with sp_lightning.stream(net, device, window=1) as handle:
        for one in handle.calls_ended([lambda: net(x)] * 3, at_once=2):
            assert torch.is_grad_enabled() and not one.result.requires_grad
            assert [float(p.detach().sum()) for p in net.parameters()] == sums
            with pytest.raises(UnsupportedError, match="between calls in lockstep"), torch.no_grad():
                net(x)
        net(x).sum().backward()
    assert_plain(net)


@pytest.mark.parametrize("how", ["break", "close", "calls raise"])
def test_calls_end_where_they_wait_if_nobody_wants_more(how, device):
    net, x, ends = blocks(), torch.ones(2, 12, device=device), []

    def call(number):
        try:
            for _ in range(1 + 100 * (number > 0)):
                net(x)
        finally:
            ends.append(number)

    def calls():
        yield from (functools.partial(call, number) for number in range(3))
        if how == "calls raise":
            raise Failure
        yield from (functools.partial(call, number) for number in range(3, 9))

    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        expected = handle.lockstep([lambda: net(x)])[0]  # shows that calls change nothing: all begin at once
        ended = handle.calls_ended(calls(), at_once=3)
        assert next(ended).number == 0
        if how == "close":
            handle.close()
        elif how == "break":
            ended.close()
        else:
            with pytest.raises(Failure):
                next(ended)
        assert sorted(ends) == [0, 1, 2]
        if how != "close":
            assert torch.equal(net(x), expected)
    assert_plain(net)


# --- Ends


class Failure(Exception):
    pass


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_call_that_raises_ends_alone(at, device):
    net = blocks()

    def fail(*_):
        raise Failure

    def failing():
        hook = net.blocks[at].register_forward_pre_hook(fail)
        try:
            return net(x)
        finally:
            hook.remove()

    x = torch.ones(2, 12, device=device)
    calls = [squares_of(net, x), failing, squares_of(net, 2 * x)]
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        alone = [calls[0](), calls[2]()]
        first, error, last = handle.lockstep(calls, at_once=1, return_exceptions=True)
        assert same([first, last], alone) and type(error) is Failure
        with pytest.raises(Failure):
            handle.lockstep(calls, at_once=1)
        assert same(handle.lockstep([calls[0], calls[2]]), alone)
    assert_plain(net)


def test_a_call_that_is_cancelled_ends_alone(device):
    net, x = blocks(), torch.ones(2, 12, device=device)

    def cancelled():
        net(x)
        raise asyncio.CancelledError

    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        expected = net(x)
        calls = [lambda: net(x), cancelled, lambda: net(x)]
        first, error, last = handle.lockstep(calls, return_exceptions=True)
    assert same([first, last], [expected] * 2) and type(error) is asyncio.CancelledError


def test_others_go_on_where_calls_raise_between_their_visits(device):
    net, x = blocks(), torch.ones(2, 12, device=device)

    def failing(after):
        y = net.stem(x)
        for block in net.blocks[:after]:
            y = block(y)
        raise Failure(after)

    calls = [squares_of(net, x), *(functools.partial(failing, after) for after in range(4)), squares_of(net, 3 * x)]
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        alone = [calls[0](), calls[-1]()]
        first, *errors, last = handle.lockstep(calls, at_once=6, return_exceptions=True)
    assert same([first, last], alone) and [error.args for error in errors] == [(0,), (1,), (2,), (3,)]


def test_others_wait_for_a_call_that_hangs_for_a_while(device):
    net, x = blocks(), torch.ones(2, 12, device=device)
    released = threading.Event()

    def slow():
        first = net(x)
        threading.Timer(0.1, released.set).start()
        assert released.wait(60)
        return first + net(x)

    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        expected = net(x)
        calls = [functools.partial(net, x), slow, functools.partial(net, x)]
        assert same(handle.lockstep(calls), [expected, 2 * expected, expected])


def test_an_interrupt_ends_all_calls_where_they_wait(device):
    net, x = blocks(), torch.ones(2, 12, device=device)
    ran, interrupted = [], threading.Event()

    def on_interrupt(*_):
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)

    def call(number):
        try:
            net(x)
            if number == 1:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                assert interrupted.wait(60)
            for _ in range(100):
                net(x)
            ran.append(number)
        finally:
            ran.append("ended")

    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        expected = net(x)
        try:
            with pytest.raises(KeyboardInterrupt):
                handle.lockstep([functools.partial(call, number) for number in range(5)], at_once=3)
        finally:
            signal.signal(signal.SIGINT, before)
        assert ran == ["ended"] * 3
        assert torch.equal(net(x), expected)
    assert_plain(net)


@pytest.mark.seldom
def test_after_an_interrupt_the_caller_goes_on_when_the_running_call_has_left_its_unit(monkeypatch):
    net, x, interrupted = blocks(), torch.ones(2, 12), threading.Event()

    def on_interrupt(*_):
        interrupted.set()
        raise KeyboardInterrupt

    def within(*_):
        if len(states) == 1:  # the second time
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert interrupted.wait(60)
            time.sleep(0.2)  # in which the caller ends its step, if it does not wait
        torch.rand(1)

    before, states = signal.signal(signal.SIGINT, on_interrupt), []
    with sp_lightning.stream(net, "cpu", window=1) as handle, torch.no_grad():
        net.blocks[1].up.register_forward_pre_hook(within)
        close_scope = handle.close_scope
        monkeypatch.setattr(handle, "close_scope", lambda: (time.sleep(0.5 * interrupted.is_set()), close_scope()))
        try:
            for _ in range(2):
                torch.manual_seed(0)
                with contextlib.suppress(KeyboardInterrupt):
                    handle.lockstep([functools.partial(net, x)] * 2)
                states.append(torch.get_rng_state())
        finally:
            signal.signal(signal.SIGINT, before)
    assert interrupted.is_set()
    assert torch.equal(*states)  # of the caller's generator: what a call draws comes from its own


@pytest.mark.parametrize("at_once", [2, 4])
def test_forward_mode_gradients_are_those_of_each_call_alone(at_once, device):
    net, x = blocks(), torch.ones(2, 12, device=device)

    def gradient(number):
        return torch.stack(torch.func.jvp(net, (x * number,), (x,)))

    def calls():
        made = [gradient, lambda number: torch.stack([net(x * number)] * 2), gradient, gradient]
        return [
            lambda call=call, number=number: [call(number), call(number + 1)][1] for number, call in enumerate(made)
        ]

    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        alone = [call() for call in calls()]
        for _ in range(2):
            assert same(handle.lockstep(calls(), at_once), alone)


# --- Refused


def test_a_call_cannot_end_streaming(device):
    net, x = blocks(), torch.ones(2, 12, device=device)
    with sp_lightning.stream(net, device) as handle:
        error, output = handle.lockstep([handle.close, lambda: net(x)], return_exceptions=True)
        assert isinstance(error, UnsupportedError) and "call close() after lockstep()" in str(error)
        assert torch.equal(output, net(x)) and not handle.closed


def test_gradients_are_refused_in_a_call(device):
    net, x = blocks(), torch.ones(2, 12, device=device)

    def call():
        with torch.enable_grad():
            return net(x)

    with sp_lightning.stream(net, device) as handle, pytest.raises(UnsupportedError, match="gradients enabled"):
        handle.lockstep([call])


def test_calls_make_no_gradients_where_the_caller_would(device):
    net, x = blocks(), torch.ones(2, 12, device=device)
    with sp_lightning.stream(net, device) as handle:
        (output,) = handle.lockstep([lambda: net(x)])
        assert not output.requires_grad
        net(x).sum().backward()


def test_a_thread_of_a_call_s_own_is_refused(device):
    net, x, errors = blocks(), torch.ones(2, 12, device=device), []

    def other():
        try:
            with torch.no_grad():
                net(x)
        except UnsupportedError as error:
            errors.append(str(error))

    def call():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return net(x)

    with sp_lightning.stream(net, device) as handle, torch.no_grad():
        assert same(handle.lockstep([call, call]), [net(x)] * 2)
    assert len(errors) == 2 and "by a thread that a call in lockstep began" in errors[0]


def test_lockstep_is_refused_where_no_weights_can_be_shared(device):
    net, x = blocks(), torch.ones(2, 12, device=device)
    with sp_lightning.stream(net, device) as handle:
        with pytest.raises(UnsupportedError, match="another lockstep"):
            handle.lockstep([lambda: handle.lockstep([lambda: net(x)])])
        with pytest.raises(OptionError, match="at_once must be 'auto' or an int >= 1, got 0"):
            handle.lockstep([lambda: net(x)], at_once=0)
        with torch.device("meta"), pytest.raises(UnsupportedError, match="enter it inside of each call"):
            handle.lockstep([lambda: net(x)])
        assert handle.lockstep([]) == []
    with pytest.raises(UnsupportedError, match="after close"):
        handle.lockstep([lambda: net(x)])

"""Compiled steps of torch's optimizers: the bits of torch's default loop, or torch's operators."""

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import weakref

import forks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import parity
from sp_lightning.kernels import build, loader
from sp_lightning.memory.watched_parameters import NarrowGradient
from sp_lightning.memory.weights import Conversion
from sp_lightning.optim import native
from sp_lightning.optim.pieces import step_in_pieces

SHARED = {"lr": [1e-3, 1, 0.5, 0.0], "weight_decay": [0, 0.01], "maximize": [False, True]}
ADAM = {"betas": [(0.9, 0.999), (0.3, 0.5)], "eps": [1e-8, 1e-3]}
OPTIONS = {
    AdamW: {**SHARED, **ADAM},
    Adam: {**SHARED, **ADAM, "decoupled_weight_decay": [False, True]},
    SGD: {**SHARED, "momentum": [0.9, 0.3], "dampening": [0, 0.3], "nesterov": [False, True]},
    Adagrad: {**SHARED, "lr_decay": [0, 0.1], "eps": [1e-10, 1e-3]},
    RMSprop: {**SHARED, "alpha": [0.99, 0.3], "momentum": [0, 0.9], "centered": [False, True], "eps": [1e-8, 1e-3]},
}


@st.composite
def optimizers(draw):
    cls = draw(st.sampled_from(list(OPTIONS)))
    options = {name: draw(st.sampled_from(values)) for name, values in OPTIONS[cls].items()}
    if options.get("nesterov"):
        options["dampening"] = 0
    return cls, options


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        native.compiled()
    except build.Unavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


def numbers(shape, seed):
    """Make gradients and weights of all sizes; the special numbers are native.py's own matter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-20, 3, shape, generator=generator).float()


def bits(optimizer):
    """List the bits of parameters and state."""
    values = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    values += [value for state in optimizer.state.values() for value in state.values()]
    return [value.detach().as_subclass(torch.Tensor).clone().view(torch.int32) for value in values]


def make(cls, options, shapes):
    """Make an optimizer of parameters of these shapes."""
    return cls([torch.nn.Parameter(numbers(shape, seed)) for seed, shape in enumerate(shapes)], **options)


def train(optimizer, steps=4, before_step=lambda optimizer, step: None, with_grads=lambda optimizer, step: None):
    """Train an optimizer's parameters; return it."""
    for step in range(steps):
        before_step(optimizer, step)
        for seed, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
            param.grad = numbers(param.shape, 100 * step + seed + 50)
        with_grads(optimizer, step)
        optimizer.step()
    return optimizer


@contextlib.contextmanager
def compiled_at_once():
    """Have each step wait for compiled code; give, for each group of a step, whether such code stepped it."""
    steps, at_hand, results = native.step, native.Library.steps, []

    def waiting(self, *arguments):
        if not at_hand(self, *arguments):
            self.wait()
        return at_hand(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.Library, "steps", waiting)
        patch.setattr(native, "step", lambda *arguments: results.append(steps(*arguments)) or results[-1])
        yield results


def train_natively(optimizer, **more):
    """Train with compiled code at hand; return the optimizer, and of each group's steps which such code made."""
    shadow = step_in_pieces(optimizer)
    with compiled_at_once() as results:
        train(optimizer, **more)
    shadow.close()
    return optimizer, results


def compare(make, **more):
    """Train what this makes in both ways; return what compiled code stepped of it, having compared all bits."""
    expected = bits(train(make(), **more))
    optimizer, results = train_natively(make(), **more)
    for index, (ours, loops) in enumerate(zip(bits(optimizer), expected, strict=True)):
        assert torch.equal(ours, loops), (index, (ours != loops).sum())
    return results


SHAPES = [(native.FEWEST // 512, 512), (4096,), (3, 5, 7), (1,), (40_003,)]


@settings(max_examples=25)
@given(optimizers())
def test_bits_are_the_loops(case):
    steps = compare(lambda: make(*case, SHAPES))
    first = case[0] is Adagrad  # the others make their state in a first step
    # Of two NaNs other kernels than these may keep the other one: then torch's operators step.
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert steps == [first, True, True, True], native.LIBRARY.failure


@pytest.fixture
def library(monkeypatch):
    """A library that knows nothing yet."""
    monkeypatch.setattr(native, "LIBRARY", native.Library())
    return native.LIBRARY


def natively(cls=AdamW, shapes=SHAPES, **options):
    """Train; return whether any step was made in compiled code, having compared with torch's loop."""
    return any(compare(lambda: make(cls, options, shapes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cls", list(OPTIONS))
def test_a_step_converts_wire_copies_as_torch_does(cls, dtype):
    """All but those of other types, and those in which there is a NaN, of which torch makes several."""
    params = [torch.nn.Parameter(numbers(shape, seed)) for seed, shape in enumerate(SHAPES)]
    extreme = torch.tensor([0.0, -0.0, 1e-45, 3e-39, 6e-8, 3e-8, 65504, 65520, 3.39e38, 3.4e38, float("inf")])
    params[1].data[: len(extreme)] = extreme
    params[2].data[0, 0, 0] = float("nan")
    optimizer = cls(params, lr=1e-30, **({"momentum": 0.9} if cls is SGD else {}))  # so that the numbers stay
    shadow = step_in_pieces(optimizer)
    for _ in range(2):
        conversions = {param: Conversion(torch.ones(param.shape, dtype=dtype)) for param in params}
        for param in params:
            param.grad = torch.ones_like(param)
        with compiled_at_once() as results:
            shadow.step_groups(optimizer, optimizer.param_groups, optimizer.state, conversions)
    shadow.close()
    assert results == [True]
    for index, (param, conversion) in enumerate(conversions.items()):
        if index == 2 or dtype is torch.float32:
            assert conversion.source is None
        else:
            assert conversion.source == (param._version, param.data_ptr())
            assert not parity.difference(param.detach().to(dtype), conversion.wire)


@pytest.mark.parametrize("cls", list(OPTIONS))
def test_gradients_are_widened_as_they_are_stepped(cls):
    """All numbers of bfloat16, in tensors that end within a block or a vector."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short().view(torch.bfloat16)
    shapes = [(native.FEWEST // 512, 512), (1 << 16,), (40_003,), (4_099,), (7,)]
    found = []
    for narrow in (True, False):
        optimizer = make(cls, {"lr": 1e-3, **({"momentum": 0.9} if cls is SGD else {})}, shapes)
        shadow = step_in_pieces(optimizer)
        for step in range(3):
            for index, param in enumerate(optimizer.param_groups[0]["params"]):
                came_down = every.roll(257 * (index + step)).repeat(1 + param.numel() // len(every))[: param.numel()]
                if index != 1:
                    came_down = came_down.nan_to_num(1.0, 2.0, 3.0)
                came_down = came_down.view(param.shape)
                stays = NarrowGradient.of(came_down, torch.float32, lambda: None)
                param.grad = stays if narrow else came_down.float()
            with compiled_at_once() as results:
                optimizer.step()
        shadow.close()
        assert results == [True]
        found.append(bits(optimizer))
        for ours, wide in zip(found[0], found[-1], strict=True):
            assert torch.equal(ours, wide)


def test_gradients_that_compiled_code_widens_in_another_way_are_torchs_matter(library, monkeypatch):
    monkeypatch.setattr(native, "_widens", lambda *_: False)
    optimizer = make(AdamW, {}, SHAPES)
    shadow = step_in_pieces(optimizer)
    for _ in range(2):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = NarrowGradient.of(torch.ones(param.shape).bfloat16(), torch.float32, lambda: None)
        with compiled_at_once() as results:
            optimizer.step()
    shadow.close()
    assert results == [False]
    assert all(param.grad.wide is None for param in optimizer.param_groups[0]["params"])


WRONG = {
    "addcmul": ("return fma<Fused>(value * x, y, a);", "return a + value * x * y;"),
    "root": ("switch (request.root)", "switch (kRounded)"),
    "lerp": ("std::fabs(weight) < 0.5f", "true"),
    "last element": ("std::min(kBlock, tensors.count - at)", "std::min(kBlock, tensors.count - at - 1)"),
}


def few_of(wrong):
    """The first, and the others, of which each is a build, in a slow run."""
    first, *others = wrong
    return [first, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


@pytest.mark.parametrize("what", few_of(WRONG))
def test_code_with_other_bits_is_never_used(library, what, monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO", "sp_lightning")
    source = build.SOURCE.read_text()
    assert WRONG[what][0] in source
    (tmp_path / "wrong.cpp").write_text(source.replace(*WRONG[what]))
    monkeypatch.setattr(loader, "SOURCE", tmp_path / "wrong.cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = torch.arange(1, 100_000) / 100_000
    if what == "root" and torch.equal(x.sqrt(), x.double().sqrt().float()):
        pytest.skip("torch's roots are correctly rounded here")
    assert not natively(betas=(0.3, 0.9))
    assert "bits are different here for AdamW" in caplog.text or library.failure


WRONG_CONVERSIONS = {
    torch.bfloat16: ("0x7fff", "0x8000"),
    torch.float16: ("_MM_FROUND_TO_NEAREST_INT", "_MM_FROUND_TO_ZERO"),
}


@pytest.mark.parametrize("dtype", few_of(WRONG_CONVERSIONS))
@pytest.mark.seldom
def test_conversions_with_other_bits_are_never_used(library, dtype, monkeypatch, tmp_path):
    source = build.SOURCE.read_text()
    assert WRONG_CONVERSIONS[dtype][0] in source
    (tmp_path / "wrong.cpp").write_text(source.replace(*WRONG_CONVERSIONS[dtype]))
    monkeypatch.setattr(loader, "SOURCE", tmp_path / "wrong.cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert natively()
    assert [bool(library.wire_type(torch.empty(0, dtype=each))) for each in WRONG_CONVERSIONS] == [
        each is not dtype for each in WRONG_CONVERSIONS
    ]


def test_without_a_compiler_torchs_operators_step(library, monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO", "sp_lightning")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not natively()
    assert "no C++ compiler ('/no/such/compiler', from $CXX, else c++)" in library.failure
    assert caplog.text.count("take 2 to 3 times as long") == 1


def test_a_cache_that_cannot_be_written_is_no_failure_of_a_step(library, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not natively() and str(tmp_path) in library.failure


def test_what_compiled_code_does_not_know_is_left_to_torch():
    assert natively()
    assert not natively(lr=torch.tensor(1e-3))
    assert not natively(amsgrad=True)
    assert not natively(betas=(0.0, 0.9))  # the last elements of a share have zeros of another sign
    assert not natively(shapes=[(7,)])  # nothing to gain
    assert not natively(SGD)  # keeps no state


def test_parameters_that_share_memory_are_left_to_torch():
    def two():
        flat = numbers((native.FEWEST,), 1)
        return SGD([torch.nn.Parameter(flat), torch.nn.Parameter(flat[: native.FEWEST // 2])], lr=0.1, momentum=0.9)

    assert compare(two) == []


def negated(params, state, step):
    """A gradient whose bytes are not its numbers."""
    params[-1].grad = torch.full((1,), 1j * (1 + step), dtype=torch.complex64).conj().imag
    assert params[-1].grad.is_neg() and params[-1].grad.is_contiguous()


def its_own_gradient(params, state, step):
    """With decay torch changes the weight, and with it the gradient, before it reads the gradient."""
    for param in params:
        param.grad = param.data


def one_state_for_two(params, state, step):
    """The second of two parameters finds what the first has left of their moments."""
    if step == 1:
        state[params[1]]["exp_avg"] = state[params[0]]["exp_avg"]


def a_state_of_another_class(params, state, step):
    """What an operator does to it is up to its class."""

    class Own(torch.Tensor):
        pass

    for param in params if step == 1 else ():
        state[param]["exp_avg"] = state[param]["exp_avg"].as_subclass(Own)


@pytest.mark.parametrize("odd", [negated, its_own_gradient, one_state_for_two, a_state_of_another_class])
@pytest.mark.few(2)
def test_odd_tensors_are_stepped_as_torch_steps_them(odd):
    def change(optimizer, step):
        odd(optimizer.param_groups[0]["params"], optimizer.state, step)

    shapes = [(native.FEWEST,), (native.FEWEST,), (1,)]
    steps = compare(lambda: make(AdamW, {"lr": 0.1, "weight_decay": 0.1}, shapes), with_grads=change)
    assert any(steps) == (odd is negated)  # the others


def test_after_2_to_the_24_steps_no_number_of_fp32_follows():
    def change(optimizer, step):
        for state in optimizer.state.values() if step == 1 else ():
            state["step"].fill_(2.0**24 - 1)

    assert all(compare(lambda: make(Adagrad, {"lr": 0.1, "lr_decay": 1.0}, SHAPES), before_step=change))


@pytest.mark.parametrize("lr", [1e39, float("nan")])
def test_a_learning_rate_that_is_no_number_of_fp32_is_torchs_matter(lr):
    def change(optimizer, step):
        optimizer.param_groups[0]["lr"] = lr if step == 2 else 0.1

    def outcome(train):
        optimizer = make(AdamW, {}, SHAPES)
        try:
            train(optimizer, before_step=change)
        except RuntimeError as error:
            return str(error)
        return [each.tolist() for each in bits(optimizer)]

    assert outcome(train) == outcome(train_natively)


def test_a_momentum_that_becomes_nothing_leaves_its_buffer_alone():
    def change(optimizer, step):
        optimizer.param_groups[0]["momentum"] = (0.9, 0.9, 0, 0.9)[step]

    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    assert compare(lambda: make(SGD, options, SHAPES), before_step=change) == [False, True, True]


def test_groups_that_share_memory_are_left_to_torch():
    def two():
        params = [torch.nn.Parameter(flat) for flat in [numbers((native.FEWEST,), 1)] * 2]
        return AdamW([{"params": params[:1], "amsgrad": True}, {"params": params[1:]}])

    assert compare(two) == []


def test_options_may_be_lists():
    optimizer = AdamW([torch.nn.Parameter(numbers((native.FEWEST,), 1))])
    optimizer.param_groups[0]["betas"] = [0.9, 0.95]
    assert native.LIBRARY.steps(optimizer, optimizer.param_groups[0]) in (True, False)
    native.LIBRARY.wait()


def test_what_waits_to_be_compared_keeps_no_tensor_of_a_step_and_fails_with_the_first(library, monkeypatch):
    goes_on = threading.Event()

    def compiled():
        assert goes_on.wait(60)
        raise build.Unavailable("there is no compiler")

    def ask():
        optimizer = AdamW([torch.nn.Parameter(torch.ones(3))])
        (group,) = optimizer.param_groups
        reasons = [library.why_not(optimizer, {**group, "eps": eps}) for eps in (1e-8, 1e-3)]
        return reasons, weakref.ref(group["params"][0])

    monkeypatch.setattr(native, "compiled", compiled)
    reasons, parameter = ask()
    gc.collect()
    assert parameter() is None and reasons == ["it is not compared yet"] * 2
    goes_on.set()
    library.wait()
    assert ask()[0] == ["there is no compiler"] * 2


def test_a_thread_that_flushes_denormals_is_left_to_torch(library):
    """What is compared meanwhile is compared for all threads."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert not natively()
    finally:
        torch.set_flush_denormal(False)
    assert natively()


def test_autograd_sees_what_compiled_code_changed():
    param = torch.nn.Parameter(numbers((native.FEWEST,), 1))
    optimizer = AdamW([param])
    shadow = step_in_pieces(optimizer)
    param.square().sum().backward()
    optimizer.step()
    assert native.LIBRARY.steps(optimizer, optimizer.param_groups[0]) or native.LIBRARY.wait() is None
    loss = param.square().sum()
    optimizer.step()
    shadow.close()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", build.variants())
def test_every_variant_has_the_bits_of_the_loop(name, library, monkeypatch):
    if not loader._instructions().issuperset(build.variants()[name]):
        pytest.skip(f"this processor does not run {name}")
    monkeypatch.setenv(loader.SWITCH, name)
    for cls in OPTIONS:
        assert natively(cls, lr=0.1, weight_decay=0.01, **({"momentum": 0.9} if cls is SGD else {}))
    assert library.variant == name
    assert all(library.wire_type(torch.empty(0, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16))
    assert all(library.grad_type(torch.empty(0, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16))


@pytest.mark.parametrize(
    "asked, said",
    [("none", "SP_LIGHTNING_KERNELS is 'none'"), ("avx3", "SP_LIGHTNING_KERNELS is 'avx3': this processor runs '")],
)
def test_the_switch_leaves_the_step_to_torch_and_says_so(asked, said, library, monkeypatch, caplog):
    caplog.set_level("INFO", "sp_lightning")
    monkeypatch.setenv(loader.SWITCH, asked)
    assert not natively() and library.variant is None
    assert caplog.text.count("take 2 to 3 times as long") == 1 and said in caplog.text


def test_a_variant_that_the_processor_lacks_is_not_loaded(library, monkeypatch):
    monkeypatch.setenv(loader.SWITCH, "avx512")
    monkeypatch.setattr(loader, "_instructions", lambda: frozenset({"avx2", "fma", "f16c"}))
    monkeypatch.setattr(build, "VARIANTS", {build.platform.machine(): build.VARIANTS["x86_64"]})
    assert not natively()
    assert "SP_LIGHTNING_KERNELS is 'avx512': this processor runs 'avx2', 'default'" in library.failure


def test_where_torch_has_no_openmp_its_operators_step(library, monkeypatch):
    monkeypatch.setattr(loader, "openmp_parallel", lambda: None)
    assert not natively() and library.failure == "torch was built without OpenMP"


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_bits_are_the_loops_whichever_kernels_torch_takes(capability):
    if capability == "avx512" and "avx512f" not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"{__file__}::{test_bits_are_the_loops.__name__}"]
    subprocess.run(command, env={**os.environ, "ATEN_CPU_CAPABILITY": capability}, check=True, timeout=200)


FORK = """
import os, time, torch
from sp_lightning.optim import native

optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
asked = optimizer, optimizer.param_groups[0]
torch.ones(1 << 20).add_(1)  # makes torch's threads, which a child does not have
native.LIBRARY.steps(*asked)
children = []
while native.LIBRARY._thread is not None and len(children) < 12:
    time.sleep(0.1)
    children.append(os.fork())
    if not children[-1]:
        native.LIBRARY.steps(*asked)
        native.LIBRARY.wait()
        os._exit(not native.LIBRARY.steps(*asked))
print(*(os.waitpid(child, 0)[1] for child in children))
"""

FORK_AND_DIE = """
import os, pathlib, signal, threading, time
from sp_lightning.optim import native

threading.Thread(target=native.compiled).start()
while not list(pathlib.Path(os.environ["XDG_CACHE_HOME"]).glob("*/*.lock")):
    time.sleep(0.01)
if os.fork() == 0:
    time.sleep(60)  # a worker that lives on
print("forked", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def script(tmp_path):
    """Starts a script that has compiled nothing yet; ends all of its processes."""
    started = []

    def start(code):
        started.append(forks.Program(code, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}))
        return started[-1]

    yield start
    for program in started:
        program.kill()


@pytest.mark.slow
def test_several_processes_share_one_build_also_if_they_fork_meanwhile(script, tmp_path):
    programs = [script(FORK), script(FORK)]
    ends = [end for program in programs for end in program.wait(120).stdout.split()]
    assert len(ends) > 5 and set(ends) == {"0"}
    assert [path.suffix for path in sorted((tmp_path / "sp_lightning").iterdir())] == [".lock", ".so"]


@pytest.mark.slow
def test_a_build_is_not_kept_waiting_by_children_of_a_process_that_was_killed(script, tmp_path, monkeypatch):
    (tmp_path / "slow").write_text('sleep 1\nexec c++ "$@"')
    monkeypatch.setenv("CXX", f"sh {tmp_path / 'slow'}")
    killed = script(FORK_AND_DIE).wait(60)
    assert (killed.stdout, killed.returncode) == ("forked\n", -signal.SIGKILL)
    assert script("from sp_lightning.optim import native; native.compiled()").wait(50).returncode == 0


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 4096, 100003])
@pytest.mark.parametrize("exponent", [0, -19, -20, -30, 18])
def test_norms_have_the_bits_of_torchs_of_the_widened_gradients(library, numel, exponent):
    natively()
    grads = [(torch.randn(numel) * 10.0**exponent).bfloat16() for _ in range(3)]
    found = library.norms(grads)
    assert found == [torch.linalg.vector_norm(grad.float()).item() for grad in grads]
    grads[1][numel // 2] = float("inf")
    assert library.norms(grads)[1] == float("inf")
    grads[1][numel // 2] = float("nan")
    assert library.norms(grads) is None

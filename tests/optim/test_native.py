"""Compiled steps of torch's optimizers: the bits of torch's default loop, or torch's operators."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from sp_lightning.optim import native
from sp_lightning.optim.pieces import step_in_pieces

SHARED = {"lr": [1e-3, 1, 0.5], "weight_decay": [0, 0.01], "maximize": [False, True]}
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
    except native.Unavailable as error:
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
    return [value.detach().clone().view(torch.int32) for value in values]


def train(cls, options, shapes, steps=4, before_step=lambda optimizer: None):
    """Train parameters of these shapes; return the optimizer."""
    params = [torch.nn.Parameter(numbers(shape, seed)) for seed, shape in enumerate(shapes)]
    optimizer = cls(params, **options)
    for step in range(steps):
        for seed, param in enumerate(params):
            param.grad = numbers(param.shape, 100 * step + seed + 50)
        before_step(optimizer)
        optimizer.step()
    return optimizer


def train_natively(cls, options, shapes, **more):
    """Train with compiled code at hand; return the optimizer, and for each step whether such code made it."""
    shadow, steps = None, []

    def prepare(optimizer):
        nonlocal shadow
        if shadow is None:
            shadow = step_in_pieces(optimizer)
            native.LIBRARY.steps(optimizer, optimizer.param_groups[0])
            native.LIBRARY.wait()

    with pytest.MonkeyPatch.context() as patch:
        step = native.step
        patch.setattr(native, "step", lambda *arguments: steps.append(step(*arguments)) or steps[-1])
        optimizer = train(cls, options, shapes, before_step=prepare, **more)
    shadow.close()
    return optimizer, steps


SHAPES = [(native.FEWEST // 512, 512), (4096,), (3, 5, 7), (1,), (40_003,)]


@settings(max_examples=25)
@given(optimizers())
def test_bits_are_the_loops(case):
    cls, options = case
    expected = bits(train(cls, options, SHAPES))
    optimizer, steps = train_natively(cls, options, SHAPES)
    first = cls is Adagrad  # the others make their state in a first step
    assert steps == [first, True, True, True], native.LIBRARY.failure
    for index, (ours, loops) in enumerate(zip(bits(optimizer), expected, strict=True)):
        assert torch.equal(ours, loops), (index, (ours != loops).sum())


@pytest.fixture
def library(monkeypatch):
    """A library that knows nothing yet."""
    monkeypatch.setattr(native, "LIBRARY", native.Library())
    return native.LIBRARY


def natively(cls=AdamW, shapes=SHAPES, **options):
    """Train; return whether any step was made in compiled code, having compared with torch's loop."""
    expected = bits(train(cls, options, shapes))
    optimizer, steps = train_natively(cls, options, shapes)
    assert all(map(torch.equal, bits(optimizer), expected))
    return any(steps)


WRONG = {
    "addcmul": ("return fma<Fused>(value * x, y, a);", "return a + value * x * y;"),
    "root": ("switch (request.root)", "switch (kRounded)"),
    "lerp": ("std::fabs(weight) < 0.5f", "true"),
    "last element": ("std::min(kBlock, tensors.count - at)", "std::min(kBlock, tensors.count - at - 1)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_code_with_other_bits_is_never_used(library, what, monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO", "sp_lightning")
    source = native.SOURCE.read_text()
    assert WRONG[what][0] in source
    (tmp_path / "wrong.cpp").write_text(source.replace(*WRONG[what]))
    monkeypatch.setattr(native, "SOURCE", tmp_path / "wrong.cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = torch.arange(1, 100_000) / 100_000
    if what == "root" and torch.equal(x.sqrt(), x.double().sqrt().float()):
        pytest.skip("torch's roots are correctly rounded here")
    assert not natively(betas=(0.3, 0.9))
    assert "bits are different here for AdamW" in caplog.text or library.failure


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


def test_several_processes_share_one_build(tmp_path):
    code = "from sp_lightning.optim import native; print(native.compiled())"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=100)[0] for process in processes}
    assert len(paths) == 1 and [path.suffix for path in sorted((tmp_path / "sp_lightning").iterdir())] == [
        ".lock",
        ".so",
    ]


def test_what_compiled_code_does_not_know_is_left_to_torch():
    assert natively()
    assert not natively(lr=torch.tensor(1e-3))
    assert not natively(amsgrad=True)
    assert not natively(betas=(0.0, 0.9))  # the last elements of a share have zeros of another sign
    assert not natively(shapes=[(7,)])  # nothing to gain
    assert not natively(SGD)  # keeps no state


def test_parameters_that_share_memory_are_left_to_torch():
    def make(shadowed):
        flat = numbers((native.FEWEST,), 1)
        params = [torch.nn.Parameter(flat), torch.nn.Parameter(flat[: native.FEWEST // 2])]
        optimizer = SGD(params, lr=0.1, momentum=0.9)
        shadow = step_in_pieces(optimizer) if shadowed else None
        native.LIBRARY.steps(optimizer, optimizer.param_groups[0])
        native.LIBRARY.wait()
        for step in range(3):
            for param in params:
                param.grad = numbers(param.shape, step)
            optimizer.step()
        if shadow is not None:
            shadow.close()
        return bits(optimizer)

    assert all(map(torch.equal, make(True), make(False)))


def test_a_momentum_that_becomes_nothing_leaves_its_buffer_alone():
    def make(natively):
        optimizer = SGD([torch.nn.Parameter(numbers((native.FEWEST,), 1))], lr=0.1, momentum=0.9, dampening=0.5)
        shadow = step_in_pieces(optimizer) if natively else None
        for momentum in (0.9, 0.9, 0, 0.9):
            group = optimizer.param_groups[0]
            group["momentum"] = momentum
            group["params"][0].grad = numbers((native.FEWEST,), 2)
            native.LIBRARY.steps(optimizer, group)
            native.LIBRARY.wait()
            optimizer.step()
        if shadow is not None:
            shadow.close()
        return bits(optimizer)

    assert all(map(torch.equal, make(True), make(False)))


def test_groups_that_share_memory_are_left_to_torch():
    def make(natively):
        flat = numbers((native.FEWEST,), 1)
        params = [torch.nn.Parameter(flat), torch.nn.Parameter(flat.view(-1))]
        optimizer = AdamW([{"params": params[:1], "amsgrad": True}, {"params": params[1:]}])
        shadow = step_in_pieces(optimizer) if natively else None
        for group in optimizer.param_groups:
            native.LIBRARY.steps(optimizer, group)
        native.LIBRARY.wait()
        for step in range(3):
            for param in params:
                param.grad = numbers(param.shape, step)
            optimizer.step()
        if shadow is not None:
            shadow.close()
        return bits(optimizer)

    assert all(map(torch.equal, make(True), make(False)))


def test_options_may_be_lists():
    optimizer = AdamW([torch.nn.Parameter(numbers((native.FEWEST,), 1))])
    optimizer.param_groups[0]["betas"] = [0.9, 0.95]
    assert native.LIBRARY.steps(optimizer, optimizer.param_groups[0]) in (True, False)
    native.LIBRARY.wait()


def test_a_thread_that_flushes_denormals_is_left_to_torch():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert not natively()
    finally:
        torch.set_flush_denormal(False)


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


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx2", "avx512"])
def test_the_way_in_which_torch_rounds_is_found(capability):
    if capability == "avx512" and "avx512f" not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512")
    code = (
        "from sp_lightning.optim import native\n"
        "import torch\n"
        "for cls in native.RECIPES:\n"
        "    options = {'momentum': 0.9} if cls is torch.optim.SGD else {}\n"
        "    optimizer = cls([torch.nn.Parameter(torch.ones(1))], **options)\n"
        "    native.LIBRARY.steps(optimizer, optimizer.param_groups[0])\n"
        "    native.LIBRARY.wait()\n"
        "    assert native.LIBRARY.steps(optimizer, optimizer.param_groups[0]), (cls, native.LIBRARY.failure)\n"
    )
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=200)

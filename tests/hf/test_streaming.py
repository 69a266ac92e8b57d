"""The context streams what stock code would move, refuses what is not built, and leaves nothing behind."""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import importlib
import subprocess
import sys
import types
import weakref

import pytest
import torch
from side_by_side import assert_plain, blocks, inputs
from torch import nn

import sp_lightning.hf
from sp_lightning.errors import MissingExtraError, OptionError, UnsupportedError
from sp_lightning.stream.parameters import unit_of

accelerate = pytest.importorskip("accelerate", reason="sp_lightning.hf is for accelerate")
ON_DEVICE = pytest.mark.parametrize("device", [pytest.param("simgpu", marks=pytest.mark.simgpu)], indirect=True)


def streams(module):
    return all(unit_of(parameter) is not None for parameter in module.parameters())


THEIRS = ("accelerate", "transformers.trainer", "trl", "torch.nn", "torch.optim", "torch.cuda", "torch.distributed")


def is_property(value):
    return isinstance(value, property)


def attributes():
    """All that their modules have, and the classes there: what was imported, without importing more."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(THEIRS) and type(module) is types.ModuleType:
            for at, value in list(vars(module).items()):
                if isinstance(value, (type, types.FunctionType)):
                    found[name, at] = value
                if isinstance(value, type):
                    found |= {(value, own): it for own, it in vars(value).items() if callable(it) or is_property(it)}
    return found


# ---- the end


def loop(device, fails=False):
    accelerator = accelerate.Accelerator()
    net = blocks()
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    net, optimizer = accelerator.prepare(net, optimizer)
    for x in inputs(device):
        accelerator.backward(net(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if fails:
            raise ZeroDivisionError
    return net


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated")
def test_nothing_is_left_after_the_context(fails, device):
    sp_lightning.hf.enable().close()  # imports what it needs
    loop(device)
    before = attributes()
    with contextlib.suppress(ZeroDivisionError), sp_lightning.hf.streaming(window=1) as stream:
        replaced = [at for at, value in attributes().items() if before.get(at) is not value]
        try:
            loop(device, fails)
        finally:
            net = stream.handles[0].module
    assert {name for _, name in replaced} == {"prepare_model", "prepare_optimizer", "no_sync", "__init__", "to", "cuda"}
    after = attributes()
    assert [at for at in before if after.get(at) is not before[at]] == [] and len(before) > 1000
    assert_plain(net)
    assert not {"_hf_hook", "_call_impl", "forward"} & vars(net).keys()


def test_streaming_on_demand_ends_with_close(device):
    stream = sp_lightning.hf.enable(window=1)
    try:
        net = loop(device)
        assert streams(net)
    finally:
        stream.close()
    stream.close()
    assert_plain(net)


# ---- what streams


@ON_DEVICE
def test_a_model_that_is_moved_streams_and_its_place_is_ours(device):
    with sp_lightning.hf.streaming(window=1) as stream:
        net = blocks()
        assert net.to(device) is net and streams(net) and len(stream.handles) == 1
        assert net.to("cpu") is net.to(device) is net and streams(net) and len(stream.handles) == 1
        assert net.cuda() is net and streams(net) and len(stream.handles) == 1
        assert net.blocks[1].to(device) is net.blocks[1]
        assert net(next(inputs(device))).device == device
    assert_plain(net)


class Seen(nn.Module):
    """Keeps a tensor that is no buffer, and takes it along, as metrics do."""

    def __init__(self):
        super().__init__()
        self.seen = torch.ones(12)

    def _apply(self, function, recurse=True):
        self.seen = function(self.seen)
        return super()._apply(function, recurse)


@ON_DEVICE
@pytest.mark.parametrize("move", ["to", "cuda", "prepare"])
def test_what_a_streamed_model_gets_later_is_moved_with_it(device, move):
    with sp_lightning.hf.streaming(window=1) as stream:
        accelerator = accelerate.Accelerator()
        net = accelerator.prepare(blocks())
        net.register_buffer("scales", torch.ones(12))
        net.blocks[1].up.register_buffer("others", torch.ones(12))
        net.metric = Seen()
        accelerator.prepare(net) if move == "prepare" else getattr(net, move)(device)
        assert net.scales.device == net.blocks[1].up.others.device == net.metric.seen.device == device
        assert streams(net) and net.stem.weight.device.type == "cpu" and len(stream.handles) == 1
        kept = net.scales
        assert net.to(device).scales is net.to("cpu").scales is kept
        assert net.metric.seen.device == device
        net(next(inputs(device)) * net.scales).sum().backward()
    assert_plain(net)
    assert net.scales.device.type == net.metric.seen.device.type == "cpu"


@ON_DEVICE
def test_a_moved_streamed_model_keeps_its_weights_on_the_device(device):
    with sp_lightning.hf.streaming(window=100) as stream, torch.no_grad():
        net = blocks().to(device)
        for _ in range(2):
            net(next(inputs(device)))
            net.to(device)
        figures = stream.handles[0].stats()
        assert figures["fetches"] == figures["units"]


@ON_DEVICE
@pytest.mark.parametrize("recording", [False, True])
def test_a_layer_called_by_itself_gets_arguments_on_the_device(device, recording):
    """Its caller sends them to where the weight is: peft's prompt encoder, at each save of a Trainer."""

    def run(net):
        x = next(inputs(device))
        for layer in (net.stem, net.blocks[1].up, net.head):
            here = x[:, :1].expand(-1, layer.in_features).to(layer.weight.device)
            with torch.set_grad_enabled(recording):
                found = [layer(here), layer(input=here), layer(here.to(device))]
            yield from found
            if recording:
                sum(one.square().sum() for one in found).backward()
        net(x).sum().backward()
        yield from (p.grad for p in net.parameters())

    net = blocks()
    expected = list(run(copy.deepcopy(net).to(device)))
    with sp_lightning.hf.streaming(window=1) as stream:
        accelerate.Accelerator().prepare_model(net)
        resident = [weight.name for weight in stream.handles[0].units[-1].weights]
        assert {"stem.weight", "head.weight"} <= {*resident} and "blocks.1.up.weight" not in resident
        found = list(run(net))
    assert len(found) > 9 and all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(expected, found, strict=True))


@ON_DEVICE
def test_a_conversion_of_type_happens(device):
    x = next(inputs(device))
    torch.manual_seed(0)
    expected = blocks().to(device, torch.bfloat16)(x.bfloat16())
    for late in (False, True):
        torch.manual_seed(0)
        with sp_lightning.hf.streaming(window=1), torch.no_grad():
            net = blocks()
            if late:
                net.to(device)
            net.to(device, dtype=torch.bfloat16)
            assert torch.equal(net(x.bfloat16()), expected)
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}


@ON_DEVICE
@pytest.mark.parametrize("moved", [False, True], ids=["at once", "moved before"])
def test_a_conversion_reaches_buffers_beside_weights_of_that_type(device, moved):
    """As of rotary embeddings, whose frequencies are FP32 beside weights that were loaded in bfloat16."""

    def scaled():
        net = blocks().to(torch.bfloat16)
        net.register_buffer("scale", torch.full((1,), 1.1))
        return net

    expected = scaled().to(device, torch.bfloat16)
    with sp_lightning.hf.streaming(window=1):
        net = scaled()
        if moved:
            net.to(device)
        net.to(device, torch.bfloat16)
        assert streams(net) and net.scale.dtype is expected.scale.dtype and net.scale.device == expected.scale.device
        assert torch.equal(net.scale, expected.scale)


@ON_DEVICE
def test_a_layer_is_moved_as_ever(device):
    with sp_lightning.hf.streaming(window=1) as stream:
        layers = nn.Linear(2, 2).to(device), nn.Sequential(nn.ReLU(), nn.LayerNorm(2)).to(device), nn.ReLU().to(device)
        assert stream.handles == [] and layers[0].weight.device == layers[1][1].weight.device == device
        assert layers[0].cpu() is layers[0] and layers[0].weight.device.type == "cpu"


@ON_DEVICE
@pytest.mark.parametrize("move", ["to", "cuda"])
def test_a_layer_that_was_moved_streams_once_it_is_prepared(device, move, monkeypatch):
    """A model of one layer is moved by loops and by the Trainer, a layer of a model by whoever placed it."""
    x = next(inputs(device))
    net, whole = nn.Linear(12, 5), blocks()
    expected = copy.deepcopy(net).to(device)(x), copy.deepcopy(whole).to(device)(x)
    with sp_lightning.hf.streaming(window=1) as stream:
        for part in (net, whole.blocks[1].up):
            part.to(device) if move == "to" else part.cuda(device)
        accelerator = accelerate.Accelerator()
        assert accelerator.prepare(net) is net and accelerator.prepare(whole) is whole and len(stream.handles) == 2
        assert streams(net) and streams(whole) and whole.blocks[1].up.weight.device.type == "cpu"
        assert torch.equal(net(x), expected[0]) and torch.equal(whole(x), expected[1])
    assert_plain(net)


class Placed(nn.Sequential):
    """Says where it is, as models of transformers, diffusers and sentence-transformers do."""

    @property
    def device(self):
        return next(p.device for p in self.parameters())


class Distilled(nn.Module):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, x):
        return self.student(x) - self.teacher(x)


@ON_DEVICE
def test_models_that_go_to_where_another_one_is_stream_as_well(device):
    def make():
        return Placed(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 5))

    x, says = next(inputs(device)), vars(Placed)["device"]
    with sp_lightning.hf.streaming(window=1) as stream:
        student, teacher, others = make(), make(), make()
        assert student.device.type == "cpu"
        student.to(device)
        assert student.device == device and others.device.type == student[0].weight.device.type == "cpu"
        teacher.to(student.device)
        assert streams(teacher) and len(stream.handles) == 2
        loss = Distilled(student, others).to(student.device)
        assert streams(loss) and loss(x).device == others.device == device
    assert student.device == teacher.device == others.device == torch.device("cpu")
    assert vars(Placed)["device"] is says


@ON_DEVICE
@pytest.mark.parametrize("move", ["to", "prepare"])
def test_a_head_made_where_a_model_is_streams_with_the_whole(device, move):
    def train():
        torch.manual_seed(1)
        net = Placed(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 5)).to(device)
        head = nn.Linear(5, 3, device=net.device)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        whole = nn.Sequential(net, head)
        whole = whole.to(net.device) if move == "to" else accelerate.Accelerator().prepare_model(whole)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        for x in inputs(device):
            optimizer.zero_grad()
            whole(x).square().mean().backward()
            optimizer.step()
        return whole, [p.detach().to("cpu") for p in whole.parameters()]

    _, expected = train()
    with sp_lightning.hf.streaming(window=1):
        whole, found = train()
        assert streams(whole) and all(map(torch.equal, expected, found))
    assert_plain(whole)


@ON_DEVICE
def test_quantised_weights_keep_identity_when_a_parent_streams(device):
    quantization = pytest.importorskip("torchao.quantization")
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).requires_grad_(False)
    quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
    for layer in net:
        layer.weight.mark = "of user code"
    refers = [weakref.ref(parameter) for parameter in net.parameters()]
    with sp_lightning.hf.streaming(window=1) as stream:
        whole = nn.Sequential(net.to(device), nn.Linear(32, 3, device=device)).to(device)
        assert [handle.module for handle in stream.handles] == [whole] and streams(whole)
        assert all(refer() is parameter for refer, parameter in zip(refers, net.parameters(), strict=True))
        assert {layer.weight.mark for layer in net} == {"of user code"}


def test_moves_on_the_host_stream_nothing():
    with sp_lightning.hf.streaming(window=1) as stream:
        net = blocks().to("cpu").to(torch.float64).to("meta")
        assert stream.handles == [] and net.stem.weight.is_meta and net.stem.weight.dtype is torch.float64


class Moving(nn.Module):
    """Moves a part of its own in each forward, perhaps."""

    def __init__(self, moves):
        super().__init__()
        self.net, self.moves = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12)), moves

    def forward(self, x):
        return x + (self.net.to(x.device) if self.moves else self.net)(x)


class Multiplied(Seen):
    def forward(self, x):
        return x * self.seen


class Growing(nn.Module):
    """Gets a head from outside, or makes one in its first forward."""

    def __init__(self, makes_head, moves):
        super().__init__()
        self.blocks = nn.Sequential(*(Moving(moves) for _ in range(3)))
        self.head, self.makes_head = None, makes_head

    def forward(self, x):
        if self.head is None and self.makes_head:
            self.head = head().to(x.device)
        return self.blocks(x) if self.head is None else self.head(self.blocks(x))


def head():
    made = nn.Sequential(nn.Linear(12, 12), Multiplied(), nn.Linear(12, 3))
    for number, parameter in enumerate(made.parameters()):
        nn.init.constant_(parameter, 0.1 * (number + 1))
    return made


@pytest.mark.parametrize("device", ["cpu", pytest.param("simgpu", marks=pytest.mark.simgpu)], indirect=True)
@pytest.mark.parametrize("way", ["from outside", "in a forward", "moves parts of units"])
def test_moved_parts_that_a_streamed_model_gets_stream_with_it(device, way):
    def train():
        torch.manual_seed(1)
        accelerator = accelerate.Accelerator()
        net = Growing(makes_head=way == "in a forward", moves=way == "moves parts of units")
        optimizer = torch.optim.AdamW(net.parameters(), 0.05)
        net, optimizer = accelerator.prepare(net, optimizer)
        for step, x in enumerate(inputs(device, 6)):
            if step == 3 and way == "from outside":
                net.head = head().to(accelerator.device)
            if step == 3 and net.head is not None:
                optimizer.optimizer.add_param_group({"params": list(net.head.parameters())})
            accelerator.backward(net(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return net, [p.detach().to("cpu") for p in net.parameters()]

    _, expected = train()
    with sp_lightning.hf.streaming(window=1) as stream:
        net, found = train()
        assert [handle.module for handle in stream.handles] == [net] and streams(net)
        assert len(found) >= 12 and all(map(torch.equal, expected, found))
    assert_plain(net)


@ON_DEVICE
def test_modules_around_one_model_are_moved_one_after_the_other(device):
    class Around(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net, self.other, self.scale = net, copy.deepcopy(net), nn.Parameter(torch.full((5,), 0.5))
            self.head = nn.Linear(5, 5)
            self.register_buffer("center", torch.full((5,), 0.25))

        def forward(self, x):
            return (self.head(self.net(x) - self.other(x.cos())) * self.scale - self.center).square().mean()

    def train():
        torch.manual_seed(1)
        net = blocks()
        modules = [Around(net).to(device) for _ in range(3)]
        optimizer = torch.optim.SGD(nn.ModuleList(modules).parameters(), lr=0.1)
        for number, x in enumerate(inputs(device)):
            optimizer.zero_grad()
            (sum(module(x) for module in modules) + net(x).square().mean()).backward()
            optimizer.step()
            if number == 1:
                del modules[0]
                gc.collect()
                blocks().to(device)
        return net, [p.detach().to("cpu") for module in modules for p in module.parameters()]

    _, expected = train()
    with sp_lightning.hf.streaming(window=1):
        net, found = train()
        assert streams(net) and all(map(torch.equal, expected, found))
    assert_plain(net)


@ON_DEVICE
def test_a_dropped_model_is_closed_before_the_next_one_streams(device):
    with sp_lightning.hf.streaming(window=1) as stream:
        net = blocks().to(device)
        refer = weakref.ref(net)
        del net
        gc.collect()
        other = blocks().to(device)
        assert refer() is None and [handle.module for handle in stream.handles] == [other]


@ON_DEVICE
def test_a_model_that_fits_is_left_to_stock_code_if_asked(device, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(importlib.import_module("simgpu").config, "capacity", 64 << 20)
    with sp_lightning.hf.streaming(window=1, only_if_needed=True) as stream:
        accelerator = accelerate.Accelerator()
        net = accelerator.prepare(blocks())
        assert not streams(net) and net.stem.weight.device == device
        large = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        assert streams(accelerator.prepare(large)) and [handle.module for handle in stream.handles] == [large]
        net(next(inputs(device)))
    assert [line.split(": ")[1] for line in caplog.messages if "has" in line] == [
        "Stack is left to stock code",
        "Sequential streams",
    ]


@ON_DEVICE
def test_a_model_that_would_fit_streams_and_the_log_says_so(device, caplog):
    caplog.set_level("INFO")
    with sp_lightning.hf.streaming(window=1):
        assert streams(accelerate.Accelerator().prepare(blocks()))
    assert any("Stack streams, and would fit (only_if_needed=True)" in line for line in caplog.messages)


def test_a_model_that_accelerate_is_not_to_place_is_left_alone(device):
    with sp_lightning.hf.streaming(window=1) as stream:
        accelerate.Accelerator().prepare_model(blocks(), device_placement=False)
        accelerate.Accelerator(device_placement=False).prepare_model(blocks())
        assert stream.handles == []


# ---- what is refused


def test_a_wrong_option_is_refused_by_name():
    with pytest.raises(OptionError, match=r"an option must be one of window, .* got 'windows'"):
        sp_lightning.hf.streaming(windows=1)
    with pytest.raises(OptionError, match="window must be an int >= 1 or 'auto', got 0"):
        sp_lightning.hf.enable(window=0)


def test_a_second_context_is_refused():
    with sp_lightning.hf.streaming(), pytest.raises(UnsupportedError, match="one context is open at a time"):
        sp_lightning.hf.enable()


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_values_that_a_model_does_not_have_are_not_made_up(kind, device):
    """torch loads nothing into a weight on the meta device unless it is assigned."""
    with sp_lightning.hf.streaming(window=1) as stream:
        net = blocks()
        net.register_buffer("scales", torch.ones(12))
        state = net.state_dict()
        name = "stem.weight" if kind == "parameter" else "scales"
        net.to("meta") if kind == "parameter" else setattr(net, name, net.scales.to("meta"))
        with pytest.warns(UserWarning, match="is a no-op"):
            net.load_state_dict(state)
        with pytest.raises(UnsupportedError, match=rf"{name} is on the meta device.* assign=True"):
            accelerate.Accelerator().prepare_model(net)
        assert stream.handles == [] and getattr(net, name, net.stem.weight).is_meta
        net.load_state_dict(state, assign=True)
        accelerate.Accelerator().prepare_model(net)
        assert streams(net)
    assert_plain(net)
    assert all(map(torch.equal, net.state_dict().values(), state.values()))


def test_values_that_a_part_does_not_have_are_not_made_up(device):
    x = next(inputs(device))
    with sp_lightning.hf.streaming(window=1), torch.no_grad():
        net = accelerate.Accelerator().prepare_model(blocks())
        head, state = net.head, copy.deepcopy(net.head.state_dict())
        expected = net(x)
        net.head = copy.deepcopy(head).to("meta")
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"head\.weight is on the meta device"):
                net(x)
        net.head.load_state_dict(state, assign=True)
        assert torch.equal(net(x), expected)
    assert_plain(net)


def test_a_model_that_accelerate_has_dispatched_is_refused(device):
    net = blocks()
    accelerate.hooks.add_hook_to_module(net.head, accelerate.hooks.ModelHook())
    with sp_lightning.hf.streaming(), pytest.raises(UnsupportedError, match="accelerate has dispatched head already"):
        accelerate.Accelerator().prepare_model(net)


def test_a_tensor_parallel_plan_is_refused(device):
    net = blocks()
    net.tp_size = 2
    with sp_lightning.hf.streaming(), pytest.raises(UnsupportedError, match="tensor-parallel plan for 2 ranks"):
        accelerate.Accelerator().prepare_model(net)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_a_plugin_that_shards_models_is_refused(kind, device):
    accelerator = accelerate.Accelerator()
    accelerator.state.distributed_type = accelerate.DistributedType[kind]
    with sp_lightning.hf.streaming(), pytest.raises(UnsupportedError, match=f"accelerate is set up for {kind}"):
        accelerator.prepare_model(blocks(), device_placement=True)


@pytest.mark.parametrize("change", ["gone", "other arguments"])
def test_a_version_with_other_names_is_an_error_that_names_it(change, monkeypatch):
    def prepare_model(self, model, placement): ...

    if change == "gone":
        monkeypatch.delattr(accelerate.Accelerator, "prepare_model")
    else:
        monkeypatch.setattr(accelerate.Accelerator, "prepare_model", prepare_model)
    has = "no such method" if change == "gone" else r"Accelerator\.prepare_model\(model, placement\)"
    with pytest.raises(UnsupportedError, match=rf"but accelerate {accelerate.__version__} has {has}"):
        sp_lightning.hf.enable()
    sp_lightning.hf.streaming(window=1)  # none was opened


# ---- imports


def python(source):
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_package_imports_nothing_of_theirs_before_it_is_used(pytestconfig, monkeypatch):
    """More than Lightning does."""
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    source = """
import sys
import lightning.pytorch
before = set(sys.modules)
def new():
    names = {name.partition(".")[0] for name in set(sys.modules) - before}
    print(sorted(names & {"accelerate", "transformers", "trl"}))
import sp_lightning.hf
new()
sp_lightning.hf.enable().close()
new()
"""
    unused, used = (set(ast.literal_eval(line)) for line in python(source).split("\n"))
    assert unused == set() and used <= {"accelerate", "transformers"}  # accelerate looks for transformers


@pytest.fixture
def unloaded(monkeypatch):
    """Have accelerate, and what imports it, imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)


def test_without_accelerate_an_error_says_what_to_install(monkeypatch, unloaded):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    expected = r"sp_lightning.hf needs accelerate, .* pip install 'sp-lightning\[hf\]'"
    with pytest.raises(MissingExtraError, match=expected), sp_lightning.hf.streaming():
        pass


def test_an_accelerate_that_lacks_a_dependency_says_which(monkeypatch, unloaded, tmp_path):
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("import needed_by_accelerate\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="needed_by_accelerate"), sp_lightning.hf.streaming():
        pass


@pytest.mark.parametrize("resident", [0, 1, "auto"])
def test_a_model_whose_weights_were_all_replaced_goes_on(resident, device):
    def train():
        net = blocks().to(device)
        net.load_state_dict({name: value.clone() * 0.9 for name, value in net.state_dict().items()}, assign=True)
        net.to(device)
        optimizer = torch.optim.AdamW(net.parameters(), 0.05)
        for x in inputs(device):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().cpu().clone() for param in net.parameters()]

    torch.manual_seed(0)
    want = train()
    torch.manual_seed(0)
    with sp_lightning.hf.streaming(window=1, resident=resident):
        assert all(map(torch.equal, train(), want))

"""Compiled, parametrized, nested and shared modules, threads, forks and streams of the user's."""

import contextlib
import copy
import os
import signal
import threading
import time

import pytest
import torch
from stream_programs import PLACES, Block, Net, Run, cases, check, collected, stream, streamed
from torch import nn
from torch._dynamo.utils import counters

from sp_lightning.errors import UnsupportedError
from sp_lightning.stream.residency import Presence

PROGRAMS = []
program = collected(PROGRAMS)


@program()
def blocks_are_compiled_after_streaming_began(run, model):
    for block in model.blocks:
        block.compile(backend="eager")
    return run.loop(model)


@program()
def the_model_is_compiled_in_place(run, model):
    model.compile(backend="eager")
    return run.loop(model)


@program()
def the_model_is_compiled_anew_while_it_has_gradients(run, model):
    model.compile(backend="eager")
    model(run.x(0)).square().mean().backward()
    with torch.no_grad():
        return model.eval()(run.x(1))


@program()
def the_model_is_compiled_as_another_module(run, model):
    compiled, optimizer = torch.compile(model, backend="eager"), run.adamw(model.parameters())
    return [run.step(compiled, optimizer, i) for i in range(3)]


class CompiledBlocks(Net):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


@program(CompiledBlocks, "keep", "recompute")
def blocks_are_compiled_before_streaming_begins(run, model):
    return run.loop(model)


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) * 0.1)
        self.norm = nn.LayerNorm(32)

    def forward(self, x, other):
        return self.norm(x @ self.weight.t() @ other.t())


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) * 0.1)
        self.child = Child()

    def forward(self, x):
        return x + self.child(x, self.weight)


@program(lambda: Net(Parent), "keep", "recompute", units=lambda root: [b.child for b in root.blocks])
def a_child_unit_gets_a_weight_of_its_parent(run, model):
    return run.loop(model)


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.weight = nn.Parameter(torch.randn(32, 32) * 0.1)

    def forward(self, x, then):
        return x + self.linear(then(x, self.weight))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(8, 32)
        self.callers = nn.ModuleList(Caller() for _ in range(4))
        self.called = nn.ModuleList(Child() for _ in range(4))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.emb(x)
        for caller, called in zip(self.callers, self.called, strict=True):
            x = caller(x, called)
        return self.head(x)


@program(Pairs, "keep", "recompute", "offload", units=lambda root: [*root.callers, *root.called])
def a_unit_calls_another_with_its_weight(run, model):
    return run.loop(model)


@program()
def a_loop_is_in_a_stream_of_the_user_s(run, model):
    if run.device.type == "cpu":
        return run.loop(model)
    own = torch.Stream(device=run.device)
    own.wait_stream(torch.accelerator.current_stream())
    with own:
        seen = run.loop(model)
    own.synchronize()
    return seen


@program()
def two_streams_have_one_optimizer(run, model):
    torch.manual_seed(1)
    other = Net()
    if not run.is_streamed:
        other.to(run.device)
    with stream(other, run.device, window=1, chunk=512) if run.is_streamed else torch.enable_grad():
        params = [*model.parameters(), *other.parameters()]
        optimizer, seen = run.adamw(params), []
        for i in range(4):
            loss = model(run.x(i)).square().mean() + other(run.x(i + 1)).square().mean()
            loss.backward()
            seen.append(nn.utils.clip_grad_norm_(params, 0.05))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())
        return [*seen, *(param.detach().clone() for param in other.parameters())]


@pytest.mark.parametrize("device, window", PLACES)
@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
def test_modules_compute_what_they_do_in_the_plain_run(program, policy, window, device):
    check(program, device, policy, window)


def test_a_compiled_block_stays_compiled():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = Net()
    with streamed(model, "cpu"):
        for block in model.blocks:
            block.compile(backend=backend)
        model(torch.ones(4, 8)).sum().backward()
        compiled = model.blocks[0]._compiled_call_impl.compiled
    assert seen and model.blocks[0]._compiled_call_impl is compiled is not None


@pytest.mark.slow
def test_units_are_compiled_once_for_their_class_without_a_break():
    def trained(streams):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model, run = Net(), Run(torch.device("cpu"), streams)
        for block in () if streams else model.blocks:
            block.compile()
        stream = streamed(model, "cpu", units=["Block"], compile_units=True) if streams else contextlib.nullcontext()
        with stream, torch._dynamo.config.patch(suppress_errors=False):
            return run.loop(model), counters["stats"]["unique_graphs"], dict(counters["graph_break"])

    (expected, graphs, _), (found, ours, breaks) = trained(False), trained(True)
    assert all(map(torch.equal, expected, found)) and (ours, breaks) == (graphs, {})


def test_two_threads_in_one_model_are_refused():
    model, began, refused = Net(), threading.Event(), []

    class Waits(Block):
        def forward(self, x):
            began.set()
            time.sleep(0.3)
            return super().forward(x)

    model.blocks[0] = Waits()

    def call():
        began.wait()
        try:
            model(torch.ones(4, 8))
        except UnsupportedError as error:
            refused.append(str(error))

    with streamed(model, "cpu"):
        thread = threading.Thread(target=call)
        thread.start()
        model(torch.ones(4, 8))
        thread.join()
    assert refused and "call it from one thread at a time" in refused[0]


@pytest.mark.simgpu
def test_a_forked_process_may_fork():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with streamed(model, "cpu"):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)  # ends a process that hangs
            grandchild = os.fork()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) if grandchild else 7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.simgpu
def test_blocks_of_a_loop_of_the_user_s_are_loaded_ahead(monkeypatch):
    from sp_lightning.stream.residency import Presence
    from sp_lightning.stream.window import Window

    model, x, found = Net(count=8), torch.ones(4, 32, device="simgpu"), []
    bring = Window._bring

    def noted(window, unit, stream):
        found.append(unit.memory.state is not Presence.ABSENT)
        bring(window, unit, stream)

    monkeypatch.setattr(Window, "_bring", noted)
    with streamed(model, "simgpu", window=3), torch.no_grad():
        for _ in range(4):
            found.clear()
            for block in model.blocks:
                x = block(x)
        assert all(found)


@pytest.mark.parametrize("device", ["simgpu", "cpu"])
@pytest.mark.simgpu
def test_functions_of_two_streams_keep_each_to_its_window(device):
    """A student, and a teacher whose weights it is held to: a penalty reads pairs of weights outside of any call."""
    student, teacher = Net(), Net()
    plain = copy.deepcopy(student).to(device), copy.deepcopy(teacher).to(device)

    def step(student, teacher, i):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).to(device)
        held = sum((p - q).square().sum() for p, q in zip(student.parameters(), teacher.parameters(), strict=True))
        loss = (student(x) - teacher(x).detach()).square().mean() + held
        loss.backward()
        return [loss.detach().cpu()] + [p.grad.cpu().clone() for p in student.parameters()]

    with streamed(student, device, resident=0) as one, streamed(teacher.requires_grad_(False), device) as other:
        plain[1].requires_grad_(False)
        for i in range(3):
            torch.testing.assert_close(step(student, teacher, i), step(*plain, i), rtol=0, atol=0)
            for handle in (one, other):
                there = [unit for unit in handle.units if unit.memory.state is not Presence.ABSENT]
                assert sum(not unit.is_held for unit in there) <= 2

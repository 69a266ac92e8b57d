"""Where a disk fails, or has no room, a run says so with a typed error, and leaves a module that is as it was."""

import contextlib
import copy
import errno
import itertools
import os
import random
import signal
import threading
import time

import forks
import pytest
import torch
from torch import nn

import sp_lightning
from sp_lightning.disk import state_ring
from sp_lightning.disk.direct_ring import buffer_over
from sp_lightning.disk.scratch_file import ScratchFile
from sp_lightning.errors import DiskError
from sp_lightning.memory.pinned import HostAllocator
from sp_lightning.ranks.board import ONE_RANK

allocate = os.posix_fallocate


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 16)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 16)


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(65, 65), nn.Tanh()) for _ in range(4)])


def streamed(net, device, **options):
    return sp_lightning.stream(net, device, window=2, host_budget="0B", disk=os.getcwd(), **options)


def batch(device, masters=False):
    x = torch.randn(5, 65, generator=torch.Generator().manual_seed(1)).to(device)
    return x.bfloat16() if masters else x


def train(net, optimizer, device, steps=1, masters=False):
    for _ in range(steps):
        optimizer.zero_grad()
        net(batch(device, masters)).float().square().mean().backward()
        optimizer.step()


def fails_at(number, error, call=None):
    """A call to the system that fails at one call of it, and at no other."""
    calls = itertools.count()

    def failing(*given):
        if next(calls) == number:
            raise OSError(error, os.strerror(error))
        return call(*given)

    return failing


def assert_plain(net, before):
    assert all(type(p) is nn.Parameter for p in net.parameters())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


# ---- no room: "0" is the trial of the file, before anything is in it


@pytest.mark.parametrize("masters, number", [(False, 0), (True, 0), (True, 1), (True, 5)])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.few(1)
def test_a_disk_that_fails_while_a_run_begins_leaves_the_module(masters, number, error, device, monkeypatch):
    net = stack()
    before = copy.deepcopy(net.state_dict())
    said = "needs .* there, and .* are free" if error == errno.ENOSPC else "could not be written at byte"
    with monkeypatch.context() as broken:
        broken.setattr(os, "posix_fallocate", fails_at(number, error, allocate))
        with pytest.raises(DiskError, match=said) as caught, streamed(net, device, master_weights=masters):
            pass
    assert caught.value.errno == error and caught.value.writes
    assert_plain(net, before)
    with streamed(net, device, master_weights=masters):
        train(net, torch.optim.AdamW(net.parameters()), device, masters=masters)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_as_weights_move_there_leaves_the_module(error, device, monkeypatch):
    net = stack()
    before = copy.deepcopy(net.state_dict())
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", fails_at(6, error, os.pwritev))
        with pytest.raises(DiskError, match="could not be written at byte"):
            streamed(net, device, master_weights=True)
    assert_plain(net, before)


@pytest.mark.parametrize("options", [{}, {"activations": "offload"}, {"optimizer_device": "device"}], ids=str)
@pytest.mark.few(2)
def test_a_run_goes_on_after_a_disk_was_full_while_units_were_made_anew(options, device, monkeypatch):
    """The forward that makes them raises, and the next one makes them; what the run has on the disk stays there."""
    found = []
    for disk in ({}, {"host_budget": "0B", "disk": os.getcwd()}):
        net = stack()
        optimizer = torch.optim.AdamW(net.parameters())
        with sp_lightning.stream(net, device, window=2, units="Sequential", **options, **disk) as handle:
            train(net, optimizer, device, 2)
            net.append(stack()[0])
            optimizer.add_param_group({"params": [*net[4].parameters()]})
            if disk:
                with monkeypatch.context() as broken, pytest.raises(DiskError, match="nothing was stepped"):
                    broken.setattr(os, "posix_fallocate", fails_at(3, errno.ENOSPC, allocate))
                    train(net, optimizer, device)
            train(net, optimizer, device, 2)
            assert not disk or all(
                handle.storage.state._file.place_of(optimizer.state[p]["exp_avg"]) is not None for p in net.parameters()
            )
        found.append([*net.state_dict().values(), *(optimizer.state[p]["exp_avg"] for p in net.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.few(1)
def test_a_folder_that_is_gone_before_state_is_made_is_named_and_a_run_goes_on_once_it_is_back(device, tmp_path):
    found = []
    for disk in (None, tmp_path / "disk"):
        net, options = stack(), {}
        if disk is not None:
            disk.mkdir()
            options = {"disk": str(disk), "host_budget": "0B"}
        with sp_lightning.stream(net, device, window=2, **options) as handle:
            optimizer = torch.optim.AdamW(net.parameters())
            if disk is not None:
                disk.rmdir()
                with pytest.raises(DiskError, match=f"{disk} could not be read .* No such file .* put it back"):
                    train(net, optimizer, device)
                disk.mkdir()
            train(net, optimizer, device, 2)
            assert disk is None or handle.stats()["disk_read"] > 0
        found.append(net.state_dict())
    assert all(map(torch.equal, found[0].values(), found[1].values()))


@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev"])
@pytest.mark.parametrize("kind", ["loaded", "foreach", "a subclass"])
@pytest.mark.few(1)
def test_state_that_cannot_move_to_the_disk_stays_in_memory_and_is_right(kind, call, device, monkeypatch):
    """What is loaded, and what an optimizer makes that is not stepped in portions: a step is done or not begun."""
    nets = [stack(), stack()]
    cls = type("Own", (torch.optim.AdamW,), {}) if kind == "a subclass" else torch.optim.AdamW
    optimizer, plain = (cls(net.parameters(), foreach=kind == "foreach" or None) for net in nets)
    weights = []
    with sp_lightning.stream(nets[1], device, window=2):
        for _ in range(5):
            weights.append([p.detach().clone() for p in nets[1].parameters()])
            train(nets[1], plain, device)
    real = getattr(os, call)
    failing = fails_at(0, errno.ENOSPC, real)

    def failing_for_state(*given):
        return (real if threading.current_thread().name.startswith("superpipeline-gradients") else failing)(*given)

    with streamed(nets[0], device):
        stepped = failed = 0
        if kind == "loaded":
            train(nets[0], optimizer, device, 2)
            state, stepped = copy.deepcopy(optimizer.state_dict()), 2
            optimizer.load_state_dict(state)
            del state
        else:
            nets[0](batch(device)).square().mean().backward()  # allocates gradients
        with monkeypatch.context() as broken:
            broken.setattr(os, call, failing_for_state)
            while stepped < 4:
                try:
                    train(nets[0], optimizer, device)
                except DiskError as error:
                    assert error.errno == errno.ENOSPC
                    assert ("had stepped all parameters" in str(error)) is (kind == "a subclass")
                    failed += 1
                here = list(nets[0].parameters())
                stepped += all(map(torch.equal, here, weights[stepped + 1]))
                assert all(map(torch.equal, here, weights[stepped]))
        assert failed == 1
        for mine, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert optimizer.state[mine].keys() == plain.state[theirs].keys()


# ---- direct transfers that are refused in the middle of a run


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.few(1)
def test_a_filesystem_that_refuses_direct_transfers_later_changes_no_bit(call, device, monkeypatch, caplog):
    real, calls = getattr(os, call), itertools.count()

    def refusing(fd, views, at):
        with open(f"/proc/self/fdinfo/{fd}") as lines:
            flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags"))
        if flags & os.O_DIRECT and next(calls) > 4:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, at)

    nets = [stack(), stack()]
    optimizers = [torch.optim.AdamW(net.parameters()) for net in nets]
    with sp_lightning.stream(nets[1], device, window=2):
        train(nets[1], optimizers[1], device, 3)
    monkeypatch.setattr(os, call, refusing)
    with streamed(nets[0], device) as handle:
        train(nets[0], optimizers[0], device, 3)
        assert not handle.storage.state._file.is_direct
        for mine, theirs in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
            assert all(torch.equal(mine[key], value) for key, value in theirs.items())
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    assert sum("goes through the page cache" in message for message in caplog.messages) == 1


# ---- processes that are killed, and several threads


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_killed_leaves_no_scratch_file(tmp_path):
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        try:
            (tensor,) = ScratchFile(str(tmp_path), ONE_RANK).tensors([torch.empty(1 << 22)])
            os.write(begins, b"1")
            while True:
                tensor.numpy()[:] += 1
        finally:
            os._exit(1)
    os.read(begun, 1)
    time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.listdir(tmp_path) == []
    for pipe in (begun, begins):
        os.close(pipe)


END = 110  # epochs of one step: more than fifty lives get to
KILLED = """
import os, signal, sys, threading
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
import sp_lightning
from sp_lightning.disk import state_ring

torch.set_num_threads(1)
state_ring.BUFFER = state_ring.SMALLEST = 1 << 16
folder, kill_at, precision = sys.argv[1], *sys.argv[3:]
epochs = int(sys.argv[2])
phase, seen, lock = ["begin"], [], threading.Lock()


def count(call):
    if phase[0] != "begin":
        with lock:
            seen.append(phase[0])
            if kill_at in (str(len(seen)), call):
                print(phase[0], flush=True)
                os.kill(os.getpid(), signal.SIGKILL)


def counted(name):
    real = getattr(os, name)

    def call(*args, **kwargs):
        count(name)
        result = real(*args, **kwargs)
        count(f"after {name}")
        return result

    setattr(os, name, call)


for name in ("preadv", "pwritev", "pwrite", "posix_fallocate", "fsync", "replace"):
    counted(name)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = (torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh()) for _ in range(3))
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch):
        draws = torch.Generator().manual_seed(self.current_epoch)
        x = torch.randn(40, 48, generator=draws).to(self.net[0][0].weight.dtype)
        return self.net(x).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Phases(Callback):
    def on_train_batch_start(self, *_):
        self.enter("forward")

    def on_before_backward(self, *_):
        self.enter("backward")

    def on_before_optimizer_step(self, *_):
        self.enter("step")

    def on_train_batch_end(self, *_):
        self.enter("between")

    def on_save_checkpoint(self, *_):
        self.enter("checkpoint")

    def enter(self, name):
        phase[0] = name
        count(name)


last = os.path.join(folder, "checkpoints", "last.ckpt")
master_weights = precision == "bf16-true"
strategy = sp_lightning.SuperpipelineStrategy(
    disk=os.path.join(folder, "disk"),
    host_budget="0B",
    activations="offload",
    master_weights=master_weights,
    **({} if master_weights else {"wire_dtype": "as-is"}),
)
saver = ModelCheckpoint(os.path.dirname(last), "last", every_n_epochs=1, enable_version_counter=False)
trainer = L.Trainer(
    accelerator="cpu",
    strategy=strategy,
    precision=precision,
    max_epochs=epochs,
    callbacks=[Phases(), saver],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader([0]), ckpt_path=last if os.path.exists(last) else None)
assert trainer.strategy.handle is None or trainer.strategy.handle.stats()["disk_written"]
state = trainer.optimizers[0].state_dict()["state"]
torch.save([module.state_dict(), state], os.path.join(folder, "end.pt"))
phase[0] = "begin"
print(len(seen), sorted(set(seen)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_run_that_is_killed_at_any_moment_goes_on_to_the_same_bits(precision, tmp_path):
    """Fifty kills in each, spread over two steps with their checkpoints; each life goes on from the last checkpoint."""
    folders = {name: tmp_path / name for name in ("killed", "undisturbed", "short")}
    for folder in folders.values():
        for name in ("disk", "checkpoints"):
            (folder / name).mkdir(parents=True)

    def live(name, epochs, kill_at):
        program = forks.Program(
            KILLED,
            str(folders[name]),
            str(epochs),
            str(kill_at),
            precision,
            modules=("sp_lightning", "lightning"),
        )
        try:
            done = program.wait(120)
        finally:
            program.kill()
        assert os.listdir(folders[name] / "disk") == []
        assert not [one for one in os.listdir("/dev/shm") if str(program.pid) in one or "superpipeline" in one]
        return done

    done = live("short", 3, 0)
    assert done.returncode == 0, done.stderr
    events, kills, killed_in = int(done.stdout.split()[0]) * 2 // 3, 50, []
    for number in range(kills):
        kill_at = 1 + number * events // kills if number < kills - 1 else "replace"  # which a file has a name before
        done = live("killed", 1000, kill_at)
        assert done.returncode == -signal.SIGKILL, done.stderr
        killed_in.append(done.stdout.split()[-1])
        allowed = [set(), {"last.ckpt", "last.ckpt.part"} if kill_at == "replace" else {"last.ckpt"}]
        assert set(os.listdir(folders["killed"] / "checkpoints")) in allowed
    assert set(killed_in) >= {"forward", "backward", "step", "checkpoint"}
    assert live("killed", END, 0).returncode == live("undisturbed", END, 0).returncode == 0
    assert os.listdir(folders["killed"] / "checkpoints") == ["last.ckpt"]
    ends = [torch.load(folders[name] / "end.pt") for name in ("killed", "undisturbed")]
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, ends), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_threads_that_transfer_and_user_code_see_only_what_they_wrote(tmp_path):
    """Each has blocks of its own, side by side with those of the others, and reads and writes them on both ways."""
    block, count, seconds, threads = 1 << 16, 240, 20, 4
    with contextlib.closing(ScratchFile(str(tmp_path), ONE_RANK)) as file:
        (flat,) = file.tensors([torch.empty(block * count // 8, dtype=torch.int64)])
        offset, parts = file.place_of(flat).offset, flat.view(count, -1)
        wrong, done, ends = [], [0] * threads, time.monotonic() + seconds

        def work(number):
            rng, expected = (
                random.Random(number),
                {at: torch.zeros(block // 8, dtype=torch.int64) for at in own(number)},
            )
            buffer = buffer_over(HostAllocator().plain(block))
            here = buffer.flat.view(torch.int64)
            while time.monotonic() < ends and not wrong:
                done[number] += 1
                at, value = rng.choice(list(expected)), number << 40 | done[number]
                kind = rng.choice(["write", "read", "user write", "user read", "user element"])
                if kind == "write":
                    here.fill_(value)
                    file.write(buffer.memory, offset + at * block, block)
                    expected[at].fill_(value)
                elif kind == "user write":
                    parts[at].fill_(value)
                    expected[at].fill_(value)
                elif kind == "user element":
                    element = rng.randrange(block // 8)
                    parts[at, element] = expected[at][element] = -value
                else:
                    if kind == "read":
                        here.zero_()
                        file.read(buffer.memory, offset + at * block, block)
                    if not torch.equal(here if kind == "read" else parts[at], expected[at]):
                        wrong.append((number, kind, at, done[number]))

        def own(number):
            return range(number, count, threads)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong and min(done) > 100

"""Checkpoints that go to the disk that optimizer state lies on have room there before anything is stepped."""

import contextlib
import copy
import errno
import functools
import gc
import os

import lightning as L
import pytest
import torch
import torchmetrics

import models
import parity
import sp_lightning
from sp_lightning.core.unit_numbers import aligned
from sp_lightning.disk import scratch_file, state_ring
from sp_lightning.disk.placement import in_slab
from sp_lightning.errors import DiskError
from sp_lightning.lightning import checkpoint_io


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 16)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 16)


def trainer_of(folder, callbacks=(), **options):
    return L.Trainer(
        strategy=parity.streaming_strategy("cpu", host_budget="0B", disk=os.getcwd()),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{"max_epochs": 2, "limit_val_batches": 0, **options},
    )


def fit(folder, module=None, callbacks=(), ckpt_path=None, **options):
    module = module or models.ZooModule(models.case("mlp"), optimizer="adamw")
    trainer = trainer_of(folder, callbacks, **options)
    trainer.fit(module, models.loader(models.case("mlp"), 2), ckpt_path=ckpt_path)
    return module


class Trained(models.ZooModule):
    """A module whose checkpoints have what trains."""

    def on_save_checkpoint(self, checkpoint):
        del checkpoint["state_dict"]["frozen"]


class ByState(models.ZooModule):
    """A module whose state has what trains."""

    strict_loading = False

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name != "frozen"}


class ByHook(models.ZooModule):
    """A module with a hook that leaves what does not train out of its state."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_state_dict_post_hook(type(self).leave_out)

    def leave_out(self, state, prefix, metadata):
        state.pop("frozen", None)


KEEPS = L.pytorch.callbacks.ModelCheckpoint
SAVES = functools.partial(KEEPS, every_n_train_steps=1)
NBYTES = [p.nbytes for p in models.ZooModule(models.case("mlp"), optimizer="adamw").parameters()]
WEIGHTS, STATE = sum(NBYTES), 2 * sum(map(aligned, NBYTES))
SLABS = in_slab(NBYTES)  # of gradients
ON_DISK = STATE + 2 * sum(map(aligned, NBYTES))  # with weights and gradients


@pytest.mark.parametrize(
    "options, checkpoints",
    [
        ({}, 2 * (WEIGHTS + STATE)),  # the next one and the one that it replaces
        ({"max_epochs": 1}, WEIGHTS + STATE),
        ({"max_epochs": 1, "callbacks": [SAVES]}, 2 * (WEIGHTS + STATE)),  # which saves more often
        ({"max_epochs": 1, "val_check_interval": 0.5}, 2 * (WEIGHTS + STATE)),
        ({"callbacks": [lambda path: SAVES(path, save_last=True)]}, 3 * (WEIGHTS + STATE)),
        ({"callbacks": [lambda path: SAVES(path, save_last="link")]}, 2 * (WEIGHTS + STATE)),
        ({"callbacks": [lambda path: KEEPS(path, every_n_epochs=3, save_last="link")]}, WEIGHTS + STATE),  # at the end
        ({"callbacks": [lambda path: SAVES(path, save_top_k=3, monitor="step")]}, 4 * (WEIGHTS + STATE)),
        ({"callbacks": [lambda path: KEEPS(path, save_top_k=3, monitor="step")]}, 2 * (WEIGHTS + STATE)),  # two epochs
        ({"callbacks": [lambda path: KEEPS(path, save_top_k=-1)]}, 2 * (WEIGHTS + STATE)),
        ({"callbacks": [lambda path: SAVES(path, save_top_k=-1)]}, WEIGHTS + STATE),  # of nobody knows how many
        ({"callbacks": [lambda path: SAVES(path, save_weights_only=True)]}, 2 * WEIGHTS),
        ({"callbacks": [SAVES, lambda path: SAVES(path, every_n_train_steps=2)]}, 4 * (WEIGHTS + STATE)),
        ({"callbacks": [lambda path: SAVES(path, save_top_k=0)]}, 0),
        ({"enable_checkpointing": False}, 0),
        ({"fast_dev_run": True}, 0),
    ],
)
@pytest.mark.few(1)
def test_the_next_checkpoint_and_the_one_that_it_replaces_have_room(options, checkpoints, tmp_path, monkeypatch):
    options = {**options, "callbacks": [make(tmp_path) for make in options.get("callbacks", ())]}
    needed = max(STATE + SLABS + checkpoints, ON_DISK)
    for free in (needed, needed - 1):
        with monkeypatch.context() as full:
            full.setattr(scratch_file, "free_nbytes", lambda folder, free=free: free)
            module = models.ZooModule(models.case("mlp"), optimizer="adamw")
            before = copy.deepcopy(module.state_dict())
            if free == needed:
                fit(tmp_path / str(free), module, **copy.deepcopy(options))
            else:
                said = r"checkpoints \(.*\) need" if checkpoints else "Optimizer state needs"
                with pytest.raises(DiskError, match=said):
                    fit(tmp_path / str(free), module, **copy.deepcopy(options))
                assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
        for path in tmp_path.rglob("*.ckpt"):
            path.unlink()


@pytest.mark.parametrize("last, to_come", [(False, 2), (True, 1)])
@pytest.mark.few(1)
def test_a_run_that_goes_on_replaces_what_is_there_but_for_the_checkpoint_that_it_resumed_from(
    last, to_come, tmp_path, monkeypatch
):
    """Lightning keeps that one, unless it is the last."""
    saving = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=last)
    fit(tmp_path, callbacks=[saving])
    resumed = saving.last_model_path if last else saving.best_model_path
    needed = STATE + SLABS + to_come * (WEIGHTS + STATE)
    for free in (needed, needed - 1):
        monkeypatch.setattr(scratch_file, "free_nbytes", lambda folder, free=free: free)
        with contextlib.nullcontext() if free == needed else pytest.raises(DiskError):
            again = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=last)
            fit(tmp_path, callbacks=[again], max_epochs=4, ckpt_path=resumed)


@pytest.mark.parametrize(
    "options, to_come",
    [
        ({"save_top_k": -1}, 1),
        ({"save_top_k": -1, "save_last": True}, 2),  # the last one is replaced
        ({"save_top_k": 3, "monitor": "step", "mode": "max"}, 1),
        ({"save_top_k": -1, "every_n_epochs": 2}, 0),
    ],
)
@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.few(2)
def test_a_run_that_goes_on_keeps_as_many_more_as_it_has_epochs_left(options, to_come, resumes, tmp_path, monkeypatch):
    needed = max(STATE + SLABS + to_come * (WEIGHTS + STATE), ON_DISK)
    for free in (needed, needed - 1):
        folder = tmp_path / str(free)
        saving = KEEPS(folder, **options)
        trainer, loader = trainer_of(tmp_path, [saving]), models.loader(models.case("mlp"), 2)
        module = models.ZooModule(models.case("mlp"), optimizer="adamw")
        trainer.fit(module, loader)
        with monkeypatch.context() as full, contextlib.nullcontext() if free == needed else pytest.raises(DiskError):
            full.setattr(scratch_file, "free_nbytes", lambda folder, free=free: free)
            if resumes:
                fit(tmp_path, callbacks=[KEEPS(folder, **options)], max_epochs=3, ckpt_path=saving.best_model_path)
            else:
                trainer.fit_loop.max_epochs = 3
                trainer.fit(models.ZooModule(models.case("mlp"), optimizer="adamw"), loader)


def test_what_another_run_left_is_not_replaced(tmp_path, monkeypatch):
    fit(tmp_path)
    monkeypatch.setattr(scratch_file, "free_nbytes", lambda folder: STATE + SLABS + WEIGHTS + STATE)
    with pytest.raises(DiskError):
        fit(tmp_path)


def test_checkpoints_on_another_disk_need_no_room_on_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_file, "free_nbytes", lambda folder: max(STATE + SLABS, ON_DISK))
    with monkeypatch.context() as other:
        other.setattr(checkpoint_io, "_disk_of", lambda path: path)
        fit(tmp_path)
    with pytest.raises(DiskError):
        fit(tmp_path / "here")


def test_weights_that_a_checkpoint_may_leave_out_need_no_room(tmp_path, monkeypatch):
    made = []
    for kind in (models.ZooModule, Trained, ByState, ByHook):
        module = kind(models.case("mlp"), optimizer="adamw")
        module.frozen = torch.nn.Parameter(torch.zeros(WEIGHTS), requires_grad=False)
        module.metric = torchmetrics.MeanMetric()  # whose state lacks no weight
        made.append(module)
    monkeypatch.setattr(scratch_file, "free_nbytes", lambda folder: STATE + SLABS + 2 * (WEIGHTS + STATE))
    with pytest.raises(DiskError):
        fit(tmp_path, made[0])
    for number, module in enumerate(made[1:]):
        fit(tmp_path / str(number), module)
        assert all("frozen" not in torch.load(path)["state_dict"] for path in tmp_path.rglob("*.ckpt"))


# ---- runs one after the other: what lies on the disk already needs no more room


@pytest.fixture
def quota(monkeypatch):
    """A disk of so many bytes for scratch files, which is full where they are used."""
    allocate, most = os.posix_fallocate, [0]

    def used():
        places = [place for file in list(scratch_file.FILES) for place in file._places.values()]
        return sum(-(-place.nbytes // 4096) * 4096 for place in places)

    def allocated(fd, begin, nbytes):
        if nbytes > 4096 and used() + nbytes > most[0]:  # not the trial of a file
            raise OSError(errno.ENOSPC, "No space left on device")
        return allocate(fd, begin, nbytes)

    def of(nbytes):
        gc.collect()
        most[0] = used() + nbytes

    monkeypatch.setattr(os, "posix_fallocate", allocated)
    monkeypatch.setattr(scratch_file, "free_nbytes", lambda folder: most[0] - used())
    return of


class Planned(models.ZooModule):
    """A module with a scheduler, which leaves its optimizer in a cycle, or one that keeps its optimizer."""

    kept = None

    def configure_optimizers(self):
        if self.kept is not None:
            return self.kept
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


ROUNDED = 3 * sum(-(-nbytes // 4096) * 4096 for nbytes in NBYTES) + SLABS
LARGEST = 3 * max(-(-nbytes // 4096) * 4096 for nbytes in NBYTES)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.few(1)
def test_a_second_fit_asks_only_for_what_is_to_come(keeps, tmp_path, quota):
    nets = []
    for room in (ROUNDED + LARGEST + SLABS, 1 << 30):  # the last gradients are left to the user
        quota(room)
        torch.manual_seed(0)
        module = Planned(models.case("mlp"), optimizer="adamw")
        if keeps:
            module.kept = torch.optim.AdamW(module.parameters(), lr=0.01)
        options = {"max_epochs": 1, "enable_checkpointing": False}
        trainer = trainer_of(tmp_path, **options)
        for _ in range(3):
            trainer.fit_loop.epoch_progress.reset()
            trainer.fit(module, models.loader(models.case("mlp"), 2))
            assert trainer.strategy.handle._counters.disk_written > 0
        nets.append(copy.deepcopy(module.state_dict()))
    assert all(torch.equal(value, nets[1][name]) for name, value in nets[0].items())


def test_a_second_fit_on_another_disk_asks_for_all(tmp_path, quota):
    quota(ROUNDED + LARGEST)
    module = Planned(models.case("mlp"), optimizer="adamw")
    module.kept = torch.optim.AdamW(module.parameters(), lr=0.01)
    trainer = trainer_of(tmp_path, max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, models.loader(models.case("mlp"), 2))
    for file in scratch_file.FILES:
        file.device += 1
    with pytest.raises(DiskError, match="Optimizer state needs"):
        trainer.fit(module, models.loader(models.case("mlp"), 2))


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.few(1)
def test_a_second_handle_asks_only_for_what_is_to_come(master_weights, quota):
    def make():
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        return net, torch.optim.AdamW(net.parameters())

    def train(net, optimizer):
        options = {"disk": os.getcwd(), "host_budget": "0B", "master_weights": master_weights, "wire_dtype": wire_dtype}
        with sp_lightning.stream(net, "cpu", **options) as handle:
            net(torch.ones(3, 64, dtype=torch.bfloat16 if master_weights else torch.float32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert handle.stats()["disk_written"] > 0

    wires, wire_dtype = (4 * (8192 + 4096), "auto") if master_weights else (0, "as-is")
    net, optimizer = make()
    quota(3 * 4 * (16384 + 4096) + 3 * 16384 + wires + 4 * (16384 + 8192))
    for _ in range(2):  # the state moves
        train(net, optimizer)
    optimizer = torch.optim.AdamW(net.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(net, optimizer)
    optimizer = torch.optim.AdamW(net.parameters())  # the other one is left in a cycle, and its state with it
    train(net, optimizer)
    other = torch.optim.AdamW(net.parameters())
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(DiskError, match="nothing was stepped"):  # the state of both at once has no room
        train(net, other)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


# ---- Fabric, whose optimizers are known when they are set up


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.few(1)
def test_fabric_asks_for_room_for_all_optimizers_that_were_set_up(together, quota):
    def set_up(fabric):
        made = []
        for seed in range(2):
            torch.manual_seed(seed)
            net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
            optimizer = torch.optim.AdamW(net.parameters())
            if together:
                made.append(fabric.setup(net, optimizer))
            else:
                made.append((fabric.setup_module(net), fabric.setup_optimizers(optimizer)))
        return made

    def fabric():
        options = {"host_budget": "0B", "disk": os.getcwd(), "wire_dtype": "as-is"}
        return L.Fabric(accelerator="cpu", strategy=sp_lightning.SuperpipelineFabricStrategy(**options))

    weights, gradients = 2 * 4 * (16384 + 4096), 2 * 4 * (16384 + 8192)
    quota((455 << 10) + weights)
    refused = fabric()
    with pytest.raises(DiskError, match=r"Optimizer state needs 456.00 KiB there, and 455.*nothing was stepped"):
        set_up(refused)  # each by itself has room
    refused.strategy.teardown()
    quota(3 * weights + gradients)
    roomy = fabric()
    for net, optimizer in set_up(roomy):
        net(torch.ones(3, 64)).sum().backward()
        optimizer.step()
        assert all(state["exp_avg"].any() for state in optimizer.state.values())
    roomy.strategy.teardown()


@pytest.mark.parametrize("with_fabric", [False, True])
@pytest.mark.few(1)
def test_more_state_than_adamw_has_is_an_error_before_the_run(with_fabric, tmp_path, quota):
    class Module(models.ZooModule):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), amsgrad=True)

    module, checkpoints = Module(models.case("mlp"), optimizer="adamw"), {"enable_checkpointing": False}
    options = {"host_budget": "0B", "disk": os.getcwd()}
    for room, has_room in ((ON_DISK, False), (2 * ROUNDED, True)):
        quota(room)
        with contextlib.nullcontext() if has_room else pytest.raises(DiskError, match="Optimizer state needs"):
            if with_fabric:
                strategy = sp_lightning.SuperpipelineFabricStrategy(**options)
                L.Fabric(accelerator="cpu", strategy=strategy).setup(module, module.configure_optimizers())
                strategy.teardown()
            else:
                fit(tmp_path, module, **checkpoints)


@pytest.mark.parametrize("kind, state", [(torch.optim.AdamW, 2 * (16384 + 512)), (torch.optim.Adafactor, 512)])
def test_what_is_to_come_is_what_is_not_there_yet(kind, state):
    """Of Adafactor only state of its parameter's shape lies on the disk, that of biases."""
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = kind(net.parameters())
    with sp_lightning.stream(net, "cpu", disk=os.getcwd(), host_budget="0B", wire_dtype="as-is") as handle:
        disk = handle.steps.state
        disk.check_room([optimizer])
        assert disk.to_come == 4 * (state + 16384 + 8192)
        for pending in (None, "deferred"):
            net(torch.ones(3, 64)).sum().backward()
            optimizer.step()
            assert handle.stats()["pending_step"] == pending or kind is torch.optim.Adafactor
            assert disk.to_come == 0

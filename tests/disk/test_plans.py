"""A plan says which weights stay in files, what a step reads from them, to the byte, and what is left in memory."""

import bisect
import functools

import in_files
import pytest
import torch
from torch import nn

import parity
import sp_lightning
from sp_lightning.core.machine import GIB, PROFILES
from sp_lightning.core.schedule import Schedule
from sp_lightning.core.simulation import simulate
from sp_lightning.core.unit_numbers import UnitNumbers
from sp_lightning.disk import activation_blocks, placement, state_ring
from sp_lightning.memory.weights import BY_ITSELF
from sp_lightning.planning import plan


class Adapted(nn.Module):
    """A frozen layer with a small one beside it that trains."""

    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x)) + self.adapter(x)


def model(place=None):
    torch.manual_seed(0)
    frozen = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()).requires_grad_(False) for _ in range(6)]
    layers = [nn.Linear(64, 64), *frozen, *(Adapted(64) for _ in range(6)), nn.Linear(64, 5)]
    net = nn.Sequential(*layers)
    if place is not None:
        in_files.put(net, str(place))
    return net


UNITS = ["Sequential", "Adapted"]


def step(net, x):
    net(x).square().mean().backward()


def take_step(handle, optimizer):
    """All of it: transfers of what is deferred would count for the next step."""
    optimizer.step()
    optimizer.zero_grad()
    handle.finish_step()


def planned(net, **options):
    return plan(net, torch.ones(4, 64), machine="rtx4090", device="cpu", units=UNITS, transfer=1, **options)


@parity.product(window=[1, 2, 5, 12], activations=["keep", "recompute"], device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_step_reads_what_the_plan_says_to_the_byte(window, activations, device, tmp_path):
    options = {"window": window, "activations": activations, "host_budget": "0B", "wire_dtype": "as-is"}
    net = model(tmp_path)
    expected = planned(net, **options)
    with sp_lightning.stream(net, device, units=UNITS, transfer=1, **options) as handle:
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
        x, read = torch.ones(4, 64, device=device), []
        for _ in range(4):
            before = handle.stats()["disk_read"]
            step(net, x)
            take_step(handle, optimizer)
            read.append(handle.stats()["disk_read"] - before)
        assert handle.storage.placed.host.ring == expected.host.ring
    assert read[-1] == read[-2] == expected.disk_nbytes
    assert expected.host.weights < sum(p.nbytes for p in net.parameters() if p.requires_grad) + 20 * 512


@pytest.mark.seldom
def test_a_plan_leaves_in_files_what_a_run_does(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "MOST_SPARE", 0)  # of so small a net an eleventh is all that may be in files
    net = model(tmp_path)
    least = planned(net, host_budget="0B").host.total
    seen = set()
    for more in range(0, 120_000, 12_000):
        with sp_lightning.stream(net, "cpu", units=UNITS, host_budget=least + more, wire_dtype="as-is") as handle:
            placed = handle.storage.placed
            host = sum(unit.host_bytes().weights for unit in handle.engine.units)
        found = planned(net, host_budget=least + more)
        assert abs(found.host.weights - placed.host.weights) <= 512 * len(list(net.parameters()))
        assert host <= found.host.weights + 512 * 20 and found.fits
        seen.add(found.disk_nbytes)
    assert len(seen) > 2


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.few(1)
def test_a_step_moves_the_state_that_the_plan_says_to_the_byte(kind, device, tmp_path):
    options = {"window": 2, "host_budget": "0B", "disk": str(tmp_path), "wire_dtype": "as-is"}
    net = model(tmp_path)
    expected = planned(net, optimizer=kind, **options)
    with sp_lightning.stream(net, device, units=UNITS, transfer=1, **options) as handle:
        optimizer = getattr(torch.optim, kind)([p for p in net.parameters() if p.requires_grad])
        moved = []
        for _ in range(4):
            before = handle.stats()
            step(net, torch.ones(4, 64, device=device))
            take_step(handle, optimizer)
            after = handle.stats()
            moved.append([after[name] - before[name] for name in ("disk_read", "disk_written")])
        assert handle.storage.ring_nbytes <= expected.host.ring
    assert moved[-1] == moved[-2] == [expected.disk_nbytes + expected.on_disk, expected.on_disk]
    assert moved[-1] == [expected.disk_read_nbytes, expected.disk_written_nbytes]
    state = {"AdamW": 2, "SGD": 0, "RMSprop": 1}[kind] * sum(p.nbytes for p in net.parameters() if p.requires_grad)
    beside_files = sum(p.nbytes for layer in net if type(layer) is Adapted for p in layer.adapter.parameters())
    weights = sum(p.nbytes for p in net.parameters() if p.requires_grad) - beside_files
    gradients = weights + beside_files
    assert expected.on_disk == state + weights + gradients
    assert (expected.host.optimizer, expected.host.gradients, expected.host.weights) == (0, 0, beside_files)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.seldom
def test_a_step_moves_the_master_weights_that_the_plan_says_to_the_byte(kind, device, tmp_path):
    options = {"window": 2, "host_budget": "0B", "disk": str(tmp_path), "master_weights": True}
    net = model().requires_grad_(True)
    expected = planned(net, optimizer=kind, precision="bf16-true", **options)
    with sp_lightning.stream(net, device, units=UNITS, transfer=1, **options) as handle:
        optimizer = getattr(torch.optim, kind)(net.parameters())
        moved = []
        for _ in range(4):
            before = handle.stats()
            step(net, torch.ones(4, 64, device=device, dtype=torch.bfloat16))
            take_step(handle, optimizer)
            after = handle.stats()
            moved.append([after[name] - before[name] for name in ("disk_read", "disk_written")])
    assert moved[-1] == moved[-2] == [expected.disk_read_nbytes, expected.disk_written_nbytes]
    assert expected.on_disk == (4.5 if kind == "AdamW" else 2.5) * sum(p.nbytes for p in net.parameters())
    assert expected.host.weights == expected.host.gradients == expected.host.wire == 0


@parity.product(kind=["AdamW", "SGD"], precision=["32-true", "bf16-true"])
@pytest.mark.few(1)
def test_a_step_writes_only_the_gradients_of_units_that_are_in_no_optimizer(kind, precision, device, tmp_path):
    """A unit of which the optimizer has one weight, one of which it has all, others, and the resident rest's head."""
    half = precision != "32-true"
    options = {"window": 2, "host_budget": "0B", "disk": str(tmp_path), "master_weights": half}
    options |= {} if half else {"wire_dtype": "as-is"}

    class Partly(nn.Sequential):
        def configure_optimizers(self):
            return getattr(torch.optim, kind)([*self[3].parameters(), self[8].adapter.weight, *self[-1].parameters()])

    net = Partly(*model().requires_grad_(True))
    expected, every = (planned(net, precision=precision, optimizer=one, **options) for one in (None, kind))
    with sp_lightning.stream(net, device, units=UNITS, transfer=1, **options) as handle:
        optimizer, dtype, moved = net.configure_optimizers(), torch.bfloat16 if half else torch.float32, []
        for _ in range(4):
            before = handle.stats()
            step(net, torch.ones(4, 64, device=device, dtype=dtype))
            take_step(handle, optimizer)
            after = handle.stats()
            moved.append([after[name] - before[name] for name in ("disk_read", "disk_written")])
    assert moved[-1] == moved[-2] and moved[-1][1] == expected.disk_written_nbytes == expected.on_disk
    assert expected.gradients_on_disk == every.gradients_on_disk == sum(p.nbytes for p in net.parameters())
    assert moved[-1][0] <= expected.disk_read_nbytes < every.disk_read_nbytes


class Mixed(nn.Module):
    """A layer that autocast casts, a norm that it does not, and a weight that a function reads as it is, too."""

    def __init__(self, width, wider):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, wider), nn.Linear(wider, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.frozen(x) * self.down.weight.square().mean()


@parity.product(kind=["AdamW", "SGD"], wider=[64, 4096], window=[1, 2], device=parity.DEVICES)
@pytest.mark.seldom
def test_under_autocast_a_step_moves_the_weights_that_the_plan_says_to_the_byte(kind, wider, window, device, tmp_path):
    """A large weight that is not only cast is read from the disk for each of its ways up."""
    options = {"window": window, "host_budget": "0B", "disk": str(tmp_path), "units": ["Mixed"]}
    net = nn.Sequential(nn.Linear(64, 64), *(Mixed(64, wider) for _ in range(4)), nn.Linear(64, 5))
    size = sum(p.nbytes for p in net.parameters())
    planned = {"machine": "rtx4090", "device": "cpu", "transfer": 1, "optimizer": kind, "precision": "bf16-mixed"}
    expected = plan(net, torch.ones(4, 64), **planned, **options)
    overlaps = device.type != "cpu"  # there a run tries whether to defer a step, and what is converted where differs
    with sp_lightning.stream(net, device, transfer=1, optimizer_overlap=overlaps, **options) as handle:
        optimizer = getattr(torch.optim, kind)([p for p in net.parameters() if p.requires_grad])
        moved = []
        for _ in range(5):
            before = handle.stats()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = net(torch.ones(4, 64, device=device)).square().mean()
            loss.backward()
            take_step(handle, optimizer)
            after = handle.stats()
            moved.append([after[name] - before[name] for name in ("disk_read", "disk_written")])
        rings = handle.storage.ring_nbytes
        slabs = sum(unit.host_bytes().weights for unit in handle.engine.units)
        wires = sum(unit.host_bytes().wire for unit in handle.engine.units)
    assert moved[-1] == moved[-2] == [expected.disk_read_nbytes, expected.disk_written_nbytes]
    assert expected.disk_written_nbytes == expected.on_disk > 0
    assert rings <= expected.host.ring and expected.host.weights <= slabs <= expected.host.weights + 512 * 20
    joined = sum(p.nbytes for p in net.parameters() if p.nbytes < BY_ITSELF and not p.requires_grad)
    assert expected.host.wire <= wires <= expected.host.wire + joined + 512 * 60  # unit_numbers.py, Rule 2
    averaged = plan(net, torch.ones(4, 64), copies=1, **planned, **options)
    assert size <= averaged.host.copies <= size + 512 * 60


@pytest.mark.seldom
def test_a_plan_puts_as_much_state_on_disk_as_a_run_does(tmp_path):
    net = model()
    whole, least = planned(net).host.total, planned(net, host_budget="0B", disk=str(tmp_path)).host
    seen = set()
    for budget in range(least.total, whole, 10_000):
        options = {"host_budget": budget, "disk": str(tmp_path)}
        with sp_lightning.stream(net, "cpu", units=UNITS, wire_dtype="as-is", **options) as handle:
            on_disk = [p for p in net.parameters() if id(p) in handle.storage.state.parameters and p.requires_grad]
            travelling = [p for p in on_disk if id(p) in handle.storage._wired]
            of_units = [p for i in handle.storage.placed.gradients for _, p in handle.units[i].params]
            spilled = sum(2 * p.nbytes for p in on_disk), *(sum(p.nbytes for p in ps) for ps in (of_units, travelling))
        found = planned(net, **options)
        assert found.on_disk == sum(spilled) and found.fits
        seen.add(spilled)
    assert all(len(set(each)) > 2 for each in zip(*seen, strict=True))
    assert len(seen) > 2 or whole <= least.total


@parity.product(
    kind=["AdamW", "SGD", "Adafactor"],
    precision=["32-true", "bf16-mixed"],
    disk=[None, {}, {"activations": "offload"}, {"activations": "recompute+offload"}],
)
@pytest.mark.seldom
def test_a_plan_and_a_run_refuse_the_same_budgets(kind, precision, disk, tmp_path, monkeypatch):
    def run(budget):
        module = model(tmp_path)
        with sp_lightning.stream(module, "cpu", units=UNITS, host_budget=budget, **options) as handle:
            step(module, torch.ones(4, 64))
            getattr(torch.optim, kind)(p for p in module.parameters() if p.requires_grad).step()
            assert handle.storage.placed.units or handle.storage.placed.spilled

    monkeypatch.setattr(state_ring, "BUFFER", 1 << 15)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 15)
    monkeypatch.setattr(activation_blocks, "BLOCK_NBYTES", 4096)
    monkeypatch.setattr(activation_blocks, "SMALLEST", 4096)
    options = {} if disk is None else {"disk": str(tmp_path)} | disk
    options |= {} if precision == "bf16-mixed" else {"wire_dtype": "as-is"}
    net = model(tmp_path)
    whole = planned(net).host.total
    fits = lambda budget: planned(net, optimizer=kind, precision=precision, host_budget=budget, **options).fits_host  # noqa: E731
    first = bisect.bisect_left(range(2 * whole), True, lo=1, key=fits)
    run(first)
    with pytest.raises(sp_lightning.errors.HostMemoryError):
        run(first - 1)


SLOW = pytest.mark.slow
NO_MASTERS = {"master_weights": False}


@SLOW
def test_a_listed_model_needs_less_host_memory_with_a_disk():
    options = {"precision": "bf16-true", "master_weights": True, "machine": "rtx4090", "activations": "recompute"}
    plain = plan("llama3-8b", 32768, **options)
    found = plan("llama3-8b", 32768, host_budget="0B", disk="/", **options)
    assert found.on_disk == 18 * plain.parameters
    assert found.host.total == found.host.ring
    assert plain.host.total == 16 * plain.parameters  # gradients have two bytes there, and four on a disk
    some = plan("llama3-8b", 32768, host_budget="96GiB", disk="/", **options)
    assert some.fits_host and 0 < some.on_disk < 8 * plain.parameters and some.host.weights == 4 * plain.parameters
    assert plan("llama3-8b", 32768, copies=1, host_budget="0B", disk="/", **options).host.copies == plain.host.weights
    mixed = plan("llama3-8b", 32768, host_budget="0B", disk="/", **{**options, "precision": "bf16-mixed", **NO_MASTERS})
    assert 0.9 * found.on_disk < mixed.on_disk < found.on_disk and mixed.host.weights == mixed.host.wire == 0
    more = plan("llama3-8b", 32768, host_budget="64GiB", disk="/", **options)
    assert more.fits_host and 8 * plain.parameters < more.on_disk < found.on_disk and more.host.optimizer == 0


MASTERS = {"precision": "bf16-true", "master_weights": True}  # which lie on the disk, too
FLOORS = {  # bytes that a step reads and writes per parameter, what it writes, and steps to a drive's rating
    ("llama3-8b", "masters"): (16, 18, "145 GB", 8_300),
    ("llama3-8b", "as they are"): (16, 16, "128 GB", 9_340),
    ("llama3-70b", "masters"): (16, 18, "1.27 TB", 945),
    ("llama3-70b", "as they are"): (16, 16, "1.13 TB", 1_060),
}


@pytest.mark.parametrize(
    "name, travel",
    [cell if cell == ("llama3-8b", "masters") else pytest.param(*cell, marks=SLOW) for cell in FLOORS],
)
@pytest.mark.seldom
def test_a_plan_with_a_disk_takes_what_a_drive_takes(name, travel):
    """With few tokens, on a drive whose directions are free of each other, and on one with one pipe.

    Weights that go up again for each visit are read beside what a step reads: twice, less what stays in the window.
    """
    read, written, amount, steps = FLOORS[name, travel]
    options = {"machine": "rtx4090", "host_budget": "0B", "disk": "/"}
    options |= MASTERS if travel == "masters" else {"precision": "bf16-mixed", "wire_dtype": "as-is"}
    for duplex in (1, 0.5):
        found = plan(name, 2048, disk_speed=f"7GB,5GB,{duplex}", **options)
        ways = (found.disk_read_nbytes / 7e9, found.disk_written_nbytes / 5e9)
        seconds = max(ways) if duplex == 1 else sum(ways)
        assert found.binds == "disk" and found.floor_s <= found.step_s <= 1.2 * seconds
        assert 0.97 * seconds <= found.floor_s <= 1.05 * seconds
        assert found.disk_written_nbytes == found.on_disk == written * found.parameters
        visits = found.disk_read_nbytes - read * found.parameters
        assert visits == found.disk_nbytes and 1.8 < visits / found.parameters / (2 if read < written else 4) < 2
        assert f"writes {amount} to the disk: {steps:,} steps to 1,200 TB" in found.wear
        assert not any("assumed" in note for note in found.notes)
    assumed = plan(name, 2048, **options)
    assert any("assumed, not measured: 7 GB/s read, 5 written" in note for note in assumed.notes)
    assert f"{found.disk_written_s:.3g}" == f"{written * found.parameters / 5e9:.3g}"


EIGHT = {"machine": "rtx4090", "host_memory": "64GiB", "activations": "recompute", "loss": "chunked"}
GIVEN = {"master_weights": True, "optimizer_device": "device"}
OFFERED = {  # precision and further options, and what is offered with a disk
    ("bf16-true", ()): "disk=FOLDER",
    ("bf16-true", ("master_weights",)): "disk=FOLDER",
    ("bf16-true", ("master_weights", "optimizer_device")): "disk=FOLDER",
    ("bf16-mixed", ()): "precision='bf16-true', master_weights=True and disk=FOLDER",
}


@pytest.mark.parametrize("precision, given", OFFERED)
@pytest.mark.seldom
def test_what_a_disk_makes_room_for_is_offered_and_is_a_plan_that_fits(precision, given):
    options = {**EIGHT, "precision": precision, **{name: GIVEN[name] for name in given}}
    found, named = plan("llama3-8b", 32768, **options), OFFERED[precision, given]
    assert not found.fits_host
    change = next(change for change in found.host_changes if change.what == named)
    assert found.makes_room(change) and change.written_nbytes > 0
    typed = dict(pair.split() for pair in change.how.replace("--trainer.", "--").split("--")[1:])
    again = plan("llama3-8b", 32768, **{**options, **{key.split(".")[-1]: value for key, value in typed.items()}})
    assert again.fits and again.host.total == change.host_nbytes and again.device_nbytes == change.nbytes
    assert again.on_disk == again.disk_written_nbytes == change.written_nbytes
    assert change.step_s == again.step_s and again.wear in found.first and again.wear in str(found)
    assert any("assumed, not measured" in note for note in found.notes)
    assert not any(change.what.endswith("FOLDER") for change in again.host_changes)


def test_an_offered_disk_is_written_by_each_batch_that_is_accumulated():
    given = {**EIGHT, "host_memory": "40GiB", "precision": "bf16-true", "master_weights": True, "accumulate": 16}
    found, again = plan("llama3-8b", 2048, **given), plan("llama3-8b", 2048, **given, disk="/")
    (change,) = [change for change in found.host_changes if change.what == "disk=FOLDER"]
    assert change.written_nbytes == again.on_disk + 15 * again.gradients_on_disk > again.on_disk
    assert again.wear in str(found)


@pytest.mark.seldom
def test_a_slow_disk_is_named_after_what_is_faster_and_still_named():
    found = plan("llama3-8b", 2048, **{**EIGHT, "host_memory": "72GiB"}, precision="bf16-mixed", disk_speed="1GB,1GB")
    said = [part for part in found.first.split("; ") if "FOLDER" in part]
    assert "FOLDER" not in found.first.split("; ")[0] and said
    assert not any("assumed" in note for note in found.notes)


@pytest.mark.parametrize("several", [{"devices": 2}, {"nodes": 2, "network": "100Gb"}])
def test_several_devices_and_machines_are_offered_a_disk(several):
    two = {**EIGHT, "host_memory": "72GiB", "precision": "32-true", **several}
    found, again = plan("llama3-8b", 2048, **two), plan("llama3-8b", 2048, **two, disk="/")
    assert not found.fits_host and again.host.optimizer < found.host.optimizer and again.on_disk
    (change,) = [change for change in found.host_changes if change.what == "disk=FOLDER"]
    assert (change.host_nbytes, change.written_nbytes) == (again.host.total, again.on_disk)
    assert again.host.weights == found.host.weights and again.host.gradients == found.host.gradients


@pytest.mark.parametrize("several", [{"devices": 2}, {"nodes": 2, "network": "100Gb"}])
def test_only_the_state_of_what_ranks_share_is_planned_to_be_on_the_disk(several):
    given = {**EIGHT, "precision": "32-true", "host_memory": "256GiB", "disk": "/", "host_budget": "40GiB"}
    alone, found = plan("llama3-8b", 2048, **given), plan("llama3-8b", 2048, **given, **several)
    whole = plan("llama3-8b", 2048, **{**given, "host_budget": None}, **several)
    assert alone.host.gradients < found.host.gradients == whole.host.gradients
    assert found.on_disk == whole.parameters * 8 and not found.host.optimizer


def test_a_module_that_is_traced_is_offered_a_disk():
    def traced(**options):
        layers = functools.partial(nn.Linear, 4096, 4096)
        made = nn.Sequential(*(nn.Sequential(layers(), nn.Tanh()) for _ in range(6)))
        return plan(made, torch.ones(4, 4096), machine="rtx4090", device="cpu", host_headroom=0, **options)

    with torch.device("meta"):
        tight = {"host_memory": traced().host.total - 2**20}
        found, again = traced(**tight), traced(**tight, disk="/")
    (change,) = [change for change in found.host_changes if change.what == "disk=FOLDER"]
    assert found.makes_room(change) and again.fits and not found.fits
    figures = change.host_nbytes, change.written_nbytes, change.step_s
    assert (again.host.total, again.on_disk, again.step_s) == figures


def test_without_a_budget_nothing_is_on_disk(tmp_path):
    found = planned(model(tmp_path))
    assert found.disk_nbytes == 0 and found.host.ring == 0 and found.notes == () and found.wear == ""


def test_a_module_whose_weights_are_in_memory_has_none_in_files():
    found = planned(model(), host_budget=1000)
    assert found.disk_nbytes == 0 and not found.fits_host
    with pytest.raises(sp_lightning.errors.MemoryBudgetError, match="has a host budget of 1000 B"):
        found.check()


@SLOW
def test_what_a_budget_does_not_count_in_a_run_is_counted_by_a_plan(tmp_path):
    """An average of the weights, which is in memory wherever they are, and offloaded activations."""
    net = model(tmp_path)
    weights = sum(p.nbytes for p in net.parameters())
    found = planned(net, host_budget="0B")
    averaged = planned(net, host_budget="0B", copies=1)
    assert found.host.weights < weights <= averaged.host.copies <= weights + 20 * 512
    assert averaged.host.total == found.host.total + averaged.host.copies
    room = {"host_budget": found.host.total + 4096}
    assert planned(net, **room).fits_host and not planned(net, **room, copies=1).fits_host
    offloaded = planned(net, **room, activations="offload")
    assert offloaded.host.activations > 4096 and not offloaded.fits_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision, masters", [("32-true", False), ("bf16-true", False), ("bf16-true", True)])
def test_weights_that_precision_converts_are_in_memory(precision, masters, dtype, tmp_path):
    net = model().to(dtype)
    in_files.put(net, str(tmp_path))
    given = torch.ones(4, 64, dtype=dtype)
    options = {"precision": precision, "master_weights": masters, "host_budget": "0B"}
    found = plan(net, given, machine="rtx4090", device="cpu", units=UNITS, **options)
    becomes = torch.float32 if masters else torch.bfloat16 if precision == "bf16-true" else dtype
    assert (found.disk_nbytes > 0) == (becomes is dtype)


def test_a_model_that_is_only_planned_is_taken_to_be_in_files():
    found = planned(model, host_budget="0B")
    assert found.disk_nbytes > 0
    for said in ("taken to be in local files", "the disk's speed is assumed, not measured: 7 GB/s read, 5 written"):
        assert any(said in note for note in found.notes)


def test_the_disk_binds_where_it_is_slower_than_the_link():
    machine = PROFILES["rtx4090"]
    units = [UnitNumbers(f"block {i}", GIB, 0, 0, 1e9, 2e9, disk_nbytes=GIB * (i % 2)) for i in range(8)]
    found = simulate(units, Schedule([unit.up_nbytes for unit in units], 2, 1), machine)
    assert found.floor.binds == "disk"
    assert found.disk_nbytes == 6 * GIB
    assert found.step_s >= 6 * GIB / machine.disk_bytes_per_s
    others = [UnitNumbers(f"block {i}", GIB, 0, 0, 1e9, 2e9) for i in range(8)]
    plain = simulate(others, Schedule([unit.up_nbytes for unit in others], 2, 1), machine)
    assert plain.floor.binds == "link" and plain.step_s < found.step_s and plain.disk_nbytes == 0


def test_a_batch_that_is_accumulated_leaves_the_state_on_the_disk(tmp_path):
    slow = {"host_budget": "0B", "disk": str(tmp_path), "disk_speed": "0.1MB,0.1MB"}
    expected = planned(model(), accumulate=4, **slow)
    reads = expected.disk_read_nbytes / 1e5
    assert expected.step_s > reads > 0
    moved = expected.disk_nbytes + 2 * expected.gradients_on_disk  # weights that travel, and what is added to
    assert expected.accumulating_s < 1.1 * moved / 1e5 < 0.6 * expected.step_s

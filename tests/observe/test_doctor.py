"""The doctor: the real command, and what it says of machines that are not at hand."""

import ctypes
import dataclasses
import errno
import json
import os
import re
import shutil
import time
from types import SimpleNamespace

import in_files
import pytest

from sp_lightning import cli
from sp_lightning.commands.doctor import rows
from sp_lightning.core.host import gpus_by_vendor, is_wsl2
from sp_lightning.core.machine import MACHINES
from sp_lightning.errors import OptionError, UnsupportedError
from sp_lightning.memory.device import available
from sp_lightning.observe import disk_speed
from sp_lightning.observe.disk_speed import CHUNK, DiskSpeed, measure_disk
from sp_lightning.observe.doctor import Facts, Report, capacity, doctor, findings, of_facts
from sp_lightning.observe.mesh_speed import MeshSpeed
from sp_lightning.observe.network_speed import NetworkSpeed

GIB = 2**30
GB = 1e9

HEALTHY = Facts(
    device="cuda:0",
    device_name="a device",
    machine=MACHINES["rtx4090"],
    device_free_nbytes=23 * GIB,
    host_free_nbytes=120 * GIB,
    host_limited_by="machine",
    machine_nbytes=128 * GIB,
    pin_tried_nbytes=8 * GIB,
    pinned_nbytes=8 * GIB,
    lock_limit_nbytes=None,
    parameters_per_s=2 * GB,
    fused_parameters_per_s=2.2 * GB,
    why_not_compiled="",
    cores=16,
    threads=16,
    numa_nodes=1,
    folder="/data",
    disk_write_bytes_per_s=2 * GB,
    disk_read_bytes_per_s=2 * GB,
    disk_free_nbytes=4000 * GIB,
    gpus={"NVIDIA": 1},
    torch_accelerator="cuda",
    versions={"torch": "2.15.0+cu130", "lightning": "2.6.0", "torchvision": "0.30.0"},
    torch_wanted_by_torchvision="2.15.0",
)


DISK = DiskSpeed(
    folder="/nvme",
    filesystem="ext4",
    rotates=False,
    is_direct=True,
    read_bytes_per_s=7 * GB,
    write_bytes_per_s=5 * GB,
    sustained_bytes_per_s=4.8 * GB,
    duplex=0.8,
    written_nbytes=int(50 * GB),
    free_nbytes=1000 * GIB,
)


def on_disk(**changes):
    return facts(disk=dataclasses.replace(DISK, **changes))


def facts(**changes):
    machine = {name: changes.pop(name) for name in list(changes) if hasattr(HEALTHY.machine, name)}
    changed = dataclasses.replace(HEALTHY, **changes)
    return dataclasses.replace(changed, machine=dataclasses.replace(HEALTHY.machine, **machine))


def on_cpu(**changes):
    return facts(device="cpu", device_name="cpu", pinned_nbytes=None, **changes)


def the_one(facts):
    """The only finding, as (subject, sentence)."""
    ((subject, sentence),) = [(finding.subject, finding.sentence) for finding in findings(facts)]
    assert sentence.endswith(".") and "\n" not in sentence
    return subject, sentence


# ---- findings


def test_a_machine_that_sends_less_than_the_others_is_named():
    def rates(*found):
        network = NetworkSpeed(hosts=("gpu1", "gpu2", "gpu3"), devices=8, sent_bytes_per_s=found)
        return facts(network=network)

    assert list(findings(rates(3 * GB, 2.5 * GB, 3 * GB))) == []
    subject, sentence = the_one(rates(3 * GB, 0.5 * GB, 3.1 * GB))
    assert subject == "network"
    assert sentence.startswith("gpu2 sends 0.50 GB/s to other machines and the fastest one 3.10: all wait for it")


def test_a_network_is_in_the_report_with_what_to_plan_with():
    network = NetworkSpeed(hosts=("gpu1", "gpu2"), devices=8, sent_bytes_per_s=(3.1 * GB, 2.94 * GB))
    found = of_facts(facts(network=network))
    assert Report.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert dict(rows(found))["network"] == (
        "GB/s that each machine sends while as much comes: gpu1 3.10, gpu2 2.94; plan --nodes 2 --devices 8 "
        "--network 2.9GB"
    )


def test_the_link_between_devices_is_in_the_report_with_what_to_plan_with():
    found = of_facts(facts(mesh=MeshSpeed(devices=4, bytes_per_s=21.4 * GB)))
    assert dict(rows(found))["devices' link"] == (
        "21.40 GB/s that each of 4 sends in a sum, while as much comes; plan --tensor-parallel-size 4 --mesh-link 21GB"
    )
    assert Report.from_dict(json.loads(json.dumps(found.to_dict()))).facts == found.facts


def test_a_healthy_machine_has_none():
    assert list(findings(HEALTHY)) == list(findings(on_disk())) == []


SICK = {
    "a disk in memory": (
        on_disk(filesystem="tmpfs", elsewhere="a filesystem in memory"),
        "filesystem",
        r"/nvme is on a filesystem in memory \(tmpfs\): .* a local SSD",
    ),
    "a disk that rotates": (on_disk(rotates=True), "filesystem", r"/nvme is on a disk that rotates \(ext4\)"),
    "no direct transfers": (
        on_disk(is_direct=False, filesystem="zfs"),
        "direct transfers",
        r"zfs refuses direct transfers in /nvme: .* use ext4 or xfs",
    ),
    "a disk with one pipe": (
        on_disk(duplex=0.5),
        "disk both ways",
        r"/nvme keeps 50% of its speed each way: it shares",
    ),
    "a drive whose cache fills": (
        on_disk(sustained_bytes_per_s=1.5 * GB),
        "sustained writes",
        r"/nvme took 5\.0 GB/s at first and 1\.5 GB/s after 50 GB: .* plan with --disk 7GB,1\.5GB, and use",
    ),
    "a disk that is slow": (
        on_disk(write_bytes_per_s=0.5 * GB, sustained_bytes_per_s=0.5 * GB),
        "sustained writes",
        r"/nvme takes 0\.50 GB/s: a step of 8e9 parameters .* would write for 128 s; plan with --disk 7GB,0\.5GB",
    ),
    "no compiled code": (
        facts(why_not_compiled="no C++ compiler ('c++') is on this machine"),
        "compiled steps",
        r"2\.00e9 parameters/s by torch's operators, .* as no C\+\+ compiler .*: install a C\+\+ compiler",
    ),
    "a slow link": (
        facts(up_bytes_per_s=3.1 * GB),
        "link",
        r"3\.1 GB/s up and 25\.0 GB/s down, of 12 .* slot with 16 lanes",
    ),
    "a lopsided link": (
        facts(down_bytes_per_s=12 * GB),
        "link",
        r"25\.0 GB/s up and 12\.0 GB/s down: .* bind the process",
    ),
    "a shared wire": (facts(duplex=0.52), "duplex", r"each keeps 52% of its rate: .* accumulate_grad_batches"),
    "devices that share a switch": (
        facts(ways_up=4, ways_up_share=0.41),
        "ways up",
        r"While 4 devices load weights at once, each way up keeps 41% of its rate: .* lanes of its own",
    ),
    "few page locks": (
        facts(pinned_nbytes=GIB, lock_limit_nbytes=8 * 2**20),
        "pinned memory",
        r"1\.00 GiB of 8\.00 GiB could be page-locked \(ulimit -l: 8\.00 MiB\): raise memlock",
    ),
    "a container": (
        facts(host_limited_by="cgroup", host_nbytes=48 * GIB, host_free_nbytes=48 * GIB),
        "host memory",
        r"may take 48\.00 GiB of the machine's 128\.00 GiB: raise the memory limit",
    ),
    "little memory": (
        facts(host_free_nbytes=16 * GIB),
        "host memory",
        r"16\.00 GiB of host memory are free for a device of 24\.00 GiB, .* 18 host bytes .*: add memory",
    ),
    "Linux in Windows": (
        facts(wsl2=True, host_nbytes=32 * GIB),
        "WSL2",
        r"\(WSL2\) with 32\.00 GiB of host memory, by default half of the computer's: .*wslconfig, .* --shutdown",
    ),
    "slow memory": (facts(dram_bytes_per_s=9 * GB), "memory speed", r"moves 9\.0 GB/s, .* every channel"),
    "few threads": (facts(threads=1), "threads", r"1 thread on 16 cores, .* idle: set OMP_NUM_THREADS=16"),
    "many threads": (facts(threads=32), "threads", r"32 threads on 16 cores, .* wait .*: set OMP_NUM_THREADS=16"),
    "two nodes": (facts(numa_nodes=2), "memory nodes", r"2 memory nodes, .* numactl --cpunodebind=N"),
    "a slow loop": (
        facts(fused_parameters_per_s=5 * GB),
        "optimizer",
        r"2\.00e9 parameters/s .* 5\.00e9 .* fused_optimizer=True makes it 2\.5 times",
    ),
    "a slow disk": (
        facts(disk_write_bytes_per_s=0.1 * GB),
        "disk speed",
        r"/data takes 100 MB/s, .* 10e9 parameters would take 20 minutes: .*dirpath",
    ),
    "a full disk": (facts(disk_free_nbytes=GIB), "disk space", r"/data has 1\.00 GiB left, .* take .* GiB: free some"),
    "a foreign torchvision": (
        facts(torch_wanted_by_torchvision="2.11.0"),
        "versions",
        r"torchvision 0\.30\.0 was built for torch 2\.11\.0, found 2\.15\.0, .* install them together",
    ),
    "a torch for CPUs": (
        on_cpu(torch_accelerator=None, gpus={"NVIDIA": 2}),
        "device",
        r"torch 2\.15\.0\+cu130 was not built for the 2 NVIDIA GPUs .*: install a CUDA build",
    ),
    "a torch for another vendor": (
        on_cpu(gpus={"AMD": 1}),
        "device",
        r"was not built for the 1 AMD GPU that .*: install a ROCm build",
    ),
    "a hidden GPU": (on_cpu(), "device", r"although the system shows 1 NVIDIA GPU: pass --device cuda:0; .* driver"),
    "no GPU": (on_cpu(gpus={}, torch_accelerator=None), "device", r"0 accelerators were found, and links are copies"),
}


@pytest.mark.parametrize("name", SICK)
def test_a_finding_says_the_number_and_the_mend(name):
    sick, subject, sentence = SICK[name]
    found = the_one(sick)
    assert found[0] == subject
    assert re.search(sentence, found[1]), found[1]


def test_links_of_the_cpu_are_not_blamed():
    assert the_one(on_cpu(up_bytes_per_s=GB, duplex=0.4))[0] == "device"


# ---- capacity


def test_the_host_holds_18_bytes_per_parameter_and_2_or_4_with_lora():
    found = capacity(facts(host_free_nbytes=20 * GIB))
    assert (found.full, found.lora_half, found.lora_full) == (GIB, 9 * GIB, 9 * GIB // 2)
    assert found.full_limited_by == "host memory"


def test_a_small_device_limits_what_a_large_host_holds():
    found = capacity(facts(device_free_nbytes=GIB, host_free_nbytes=1024 * GIB))
    assert (
        found.full == found.lora_half == int(0.6 * 8 * GIB)
    )  # two units of 64 and their gradients take an eighth byte
    assert found.full_limited_by == "device memory"


def test_the_summary_says_both():
    report = Report(HEALTHY, (), capacity(HEALTHY))
    assert re.fullmatch(
        r"This machine trains up to 6\.4 billion parameters with FP32 AdamW \(limited by host memory\), and with LoRA "
        r"up to 58\.0 billion in bfloat16 or 29\.0 billion in FP32\.",
        report.summary,
    )


# ---- the command


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--quick", *arguments])
    return ended.value.code, *capsys.readouterr()


@pytest.mark.seldom
def test_the_table_has_every_fact_and_the_summary(capsys):
    status, out, _ = run(capsys, "--device", "cpu")
    assert status == 0
    assert re.search(r"parameters/s of AdamW (in compiled code|by torch's operators \(.+\)),", " ".join(out.split()))
    for name in ("device", "link", "page locks", "host memory", "host optimizer", "threads", "disk", "versions"):
        assert re.search(rf"^{name}  ", out, re.MULTILINE), name
    assert "copies in memory, as the CPU computes" in " ".join(out.split())
    assert re.search(r"This machine trains up to [\d.]+ [mb]illion parameters with FP32 AdamW", out)


@pytest.mark.simgpu
def test_json_is_the_report(capsys):
    status, out, _ = run(capsys, "--device", "simgpu", "--json")
    values = json.loads(out)
    assert status == 0 and values["facts"]["device"] == "simgpu:0"
    assert values["facts"]["pinned_nbytes"] > 0
    assert Report.from_dict(values).to_dict() == values


def test_a_disk_is_measured_both_ways_and_nothing_stays_there(tmp_path, monkeypatch):
    begin, huge = time.perf_counter(), []

    def writing(fd, memory, at, original=os.pwrite):
        huge.append(in_files.may_have_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(memory))))
        return original(fd, memory, at)

    monkeypatch.setattr(os, "pwrite", writing)
    found = measure_disk(tmp_path, 0.5, largest=32 << 20)
    assert huge and all(huge)  # as in a run: with pages of 4 KiB a disk is half as fast
    assert time.perf_counter() - begin < 20
    assert min(found.read_bytes_per_s, found.write_bytes_per_s, found.sustained_bytes_per_s) > 1e6
    assert 0 < found.duplex <= 1 and found.written_nbytes >= 3 * CHUNK and found.folder == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_direct_transfers_is_measured_through_the_page_cache(tmp_path, monkeypatch):
    def opening(path, flags, *args, original=os.open, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opening)
    found = measure_disk(tmp_path, 0.1, largest=16 << 20)
    assert not found.is_direct and found.read_bytes_per_s > 0 and list(tmp_path.iterdir()) == []


@pytest.mark.seldom
def test_the_command_shows_the_disk_that_was_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(disk_speed, "LARGEST", 16 << 20)
    status, out, _ = run(capsys, "--device", "cpu", "--quick", "--disk", str(tmp_path), "--json")
    values = json.loads(out)
    assert status == 0 and values["facts"]["disk"]["folder"] == str(tmp_path)
    assert Report.from_dict(values).to_dict() == values
    lines = dict(rows(Report.from_dict(values)))
    assert re.fullmatch(
        r"[\d.]+ GB/s read, [\d.]+ written, [\d.]+ after [\d.]+ [MG]iB; each keeps \d+% while both run; .*",
        lines["disk for weights and state"],
    )


@pytest.mark.seldom
def test_of_several_folders_each_is_measured_and_all_together(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(disk_speed, "LARGEST", 16 << 20)
    folders = [str(tmp_path / name) for name in ("a", "b")]
    list(map(os.mkdir, folders))
    status, out, _ = run(capsys, "--device", "cpu", "--quick", "--disk", *folders, "--json")
    values = json.loads(out)
    assert status == 0 and [disk["folder"] for disk in values["facts"]["disks"]] == folders
    assert values["facts"]["disk"]["folder"] == ", ".join(folders)
    report = Report.from_dict(values)
    assert report.to_dict() == values
    assert [name for name, _ in rows(report)].count("one of the disks") == 2


def test_the_slowest_of_several_disks_sets_the_pace():
    slow = dataclasses.replace(
        DISK, folder="/slow", filesystem="xfs", read_bytes_per_s=3 * GB, duplex=0.6, free_nbytes=7 * GIB, rotates=True
    )
    found = disk_speed._together([DISK, slow, DISK])
    assert (found.read_bytes_per_s, found.write_bytes_per_s, found.sustained_bytes_per_s) == (
        9 * GB,
        15 * GB,
        14.4 * GB,
    )
    assert (found.folder, found.filesystem) == ("/nvme, /slow, /nvme", "ext4, xfs")
    assert (found.duplex, found.free_nbytes, found.rotates, found.is_direct) == (0.6, 21 * GIB, True, True)
    assert any(
        one.subject.startswith("disk") and "/slow" in one.sentence for one in findings(facts(disk=DISK, disks=(slow,)))
    )


@pytest.mark.parametrize(
    "free, said", [(1 << 20, r"at least 64 MiB free \(found 1 MiB\)"), (None, "a directory that can be written")]
)
def test_a_disk_that_cannot_be_measured_is_refused(free, said, tmp_path, monkeypatch):
    if free is not None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(OptionError, match=f"disk must be .*{said}"):
        measure_disk(tmp_path if free is not None else tmp_path / "none", 1.0)


@pytest.mark.seldom
def test_nothing_stays_in_the_folder(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    report = doctor("cpu", folder, quick=True)
    assert report.facts.disk_write_bytes_per_s > 0 and report.facts.folder == str(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("device", ["banana", "cpu:x", "xpu:9"])
def test_a_device_that_is_not_there_is_refused(device):
    allowed = re.escape(", ".join(map(repr, available())))
    with pytest.raises(OptionError, match=f"device must be one of {allowed}, got {device!r}"):
        doctor(device)


def test_a_device_without_data_is_refused():
    with pytest.raises(UnsupportedError, match="'meta' holds no data"):
        doctor("meta")


def test_a_folder_that_is_not_there_is_refused(capsys):
    status, _, err = run(capsys, "--folder", "nowhere")
    assert status == 2 and "folder must be a writable directory, got 'nowhere'" in err


def test_gpus_are_found_by_what_their_drivers_show(tmp_path):
    assert gpus_by_vendor(tmp_path) == {}
    for index in range(2):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{index}:00.0").mkdir(parents=True)
    for index, identity in enumerate(("0", "5710")):  # the first node is the CPU's
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{index}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(identity)
    assert gpus_by_vendor(tmp_path) == {"NVIDIA": 2, "AMD": 1}


@pytest.mark.parametrize(
    "version, found",
    [
        ("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1)", True),
        ("Linux version 6.1.21-custom-WSL2+ (me@here)", True),
        ("Linux version 6.8.0-45-generic (buildd@lcy02)", False),
        (None, False),
    ],
)
def test_linux_in_windows_is_recognised_by_its_kernel(version, found, tmp_path):
    if version is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "version").write_text(version + "\n")
    assert is_wsl2(tmp_path) is found

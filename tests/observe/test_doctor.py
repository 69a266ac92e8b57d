"""The doctor: the real command, and what it says of machines that are not at hand."""

import dataclasses
import json
import re

import pytest

from sp_lightning import cli
from sp_lightning.errors import OptionError, UnsupportedError
from sp_lightning.host.device import available
from sp_lightning.host.machine import HostMemory, gpus_by_vendor
from sp_lightning.observe.doctor import Disk, Facts, examine, findings

GIB = 2**30

DISK = Disk(
    folder="/nvme", filesystem="ext4", elsewhere="", rotates=False, write_bytes_per_s=5e9, free_nbytes=1000 * GIB
)
HEALTHY = Facts(
    device="cuda:0",
    device_name="a device",
    device_nbytes=24 * GIB,
    gpus={"NVIDIA": 1},
    torch_version="2.15.0",
    torch_accelerator="cuda",
    host=HostMemory(total=128 * GIB, free=120 * GIB, limited_by="machine", machine=128 * GIB),
    pin_tried_nbytes=GIB,
    pinned_nbytes=GIB,
    lock_limit_nbytes=None,
    cores=16,
    threads=16,
    why_not_compiled="",
    disks=(DISK,),
)


def facts(**changes):
    return dataclasses.replace(HEALTHY, **changes)


def on_disk(**changes):
    return facts(disks=(dataclasses.replace(DISK, **changes),))


def on_cpu(**changes):
    return facts(device="cpu", pinned_nbytes=None, **changes)


def in_memory(**changes):
    return dataclasses.replace(HEALTHY.host, **changes)


SICK = {
    "a torch for CPUs": (
        on_cpu(torch_accelerator=None, gpus={"NVIDIA": 2}),
        "device",
        r"torch 2\.15\.0 was not built for the 2 NVIDIA GPUs .*: install a CUDA build",
    ),
    "a torch for another vendor": (on_cpu(gpus={"AMD": 1}), "device", r"the 1 AMD GPU that .*: install a ROCm build"),
    "an old driver": (on_cpu(), "device", r"shows 1 NVIDIA GPU, and torch 2\.15\.0 finds none: update the driver"),
    "no GPU": (on_cpu(gpus={}), "device", r"there is no accelerator: streaming works but gains nothing"),
    "few page locks": (
        facts(pinned_nbytes=GIB // 2, lock_limit_nbytes=8 * 2**20),
        "page locks",
        r"512\.00 MiB of 1\.00 GiB could be page-locked \(ulimit -l: 8\.00 MiB\).*: raise memlock",
    ),
    "a container": (
        facts(host=in_memory(total=48 * GIB, free=48 * GIB, limited_by="cgroup")),
        "host memory",
        r"may take 48\.00 GiB of the machine's 128\.00 GiB: raise the memory limit",
    ),
    "little memory": (
        facts(host=in_memory(free=16 * GIB)),
        "host memory",
        r"16\.00 GiB of host memory are free for a device of 24\.00 GiB, .* 16 bytes with AdamW: add memory",
    ),
    "few threads": (facts(threads=1), "threads", r"1 threads on 16 cores, .* idle: set OMP_NUM_THREADS=16"),
    "many threads": (facts(threads=32), "threads", r"32 threads on 16 cores, .* wait .*: set OMP_NUM_THREADS=16"),
    "no compiler": (
        facts(why_not_compiled="no C++ compiler ('c++') is on this machine"),
        "compiled steps",
        r"by torch's operators, .* as no C\+\+ compiler .*: install a C\+\+ compiler",
    ),
    "a disk of the network": (
        on_disk(filesystem="nfs", elsewhere="a network filesystem"),
        "filesystem",
        r"/nvme is on a network filesystem \(nfs\): .* a local SSD",
    ),
    "a disk that rotates": (on_disk(rotates=True), "filesystem", r"/nvme is on a disk that rotates \(ext4\)"),
    "a slow disk": (
        on_disk(write_bytes_per_s=0.5e9),
        "disk speed",
        r"/nvme takes 0\.50 GB/s: .* would write for 128 s; use an NVMe drive",
    ),
}


@pytest.mark.parametrize("name", SICK)
def test_a_finding_says_what_was_found_and_the_remedy(name):
    sick, subject, sentence = SICK[name]
    (found,) = findings(sick)
    assert found.subject == subject and re.search(sentence, found.sentence), found
    assert found.sentence.endswith(".") and "\n" not in found.sentence


def test_a_healthy_machine_has_no_findings():
    assert list(findings(HEALTHY)) == []


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    return ended.value.code, *capsys.readouterr()


def test_the_command_prints_facts_and_findings(tmp_path, capsys):
    status, out, _ = run(capsys, "--device", "cpu", "--disk", str(tmp_path))
    assert status == 0 and "\nTo fix:\n- " in out
    for name in ("device", "torch", "page locks", "host memory", "threads", "AdamW", "disk 1"):
        assert re.search(rf"^{name}  ", out, re.MULTILINE), name


@pytest.mark.simgpu
def test_json_has_the_same_facts_and_findings(tmp_path, capsys):
    status, out, _ = run(capsys, "--device", "simgpu", "--disk", str(tmp_path), "--json")
    values = json.loads(out)
    assert status == 0 and values["facts"]["device"] == "simgpu:0" and values["facts"]["pinned_nbytes"] > 0
    assert values["facts"]["disks"][0]["folder"] == str(tmp_path)
    assert all(finding.keys() == {"subject", "sentence"} for finding in values["findings"])


def test_nothing_stays_in_the_folder(tmp_path):
    assert examine("cpu", [str(tmp_path)]).disks[0].write_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["banana", "cpu:x", "xpu:9"])
def test_a_device_that_is_not_there_is_refused(device):
    allowed = re.escape(", ".join(map(repr, available())))
    with pytest.raises(OptionError, match=f"device must be one of {allowed}, got {device!r}"):
        examine(device)


def test_a_device_without_data_is_refused():
    with pytest.raises(UnsupportedError, match="'meta' holds no data"):
        examine("meta")


def test_gpus_are_found_by_what_their_drivers_show(tmp_path):
    assert gpus_by_vendor(tmp_path) == {}
    for index in range(2):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{index}:00.0").mkdir(parents=True)
    for index, identity in enumerate(("0", "5710")):  # the first node is the CPU's
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{index}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(identity)
    assert gpus_by_vendor(tmp_path) == {"NVIDIA": 2, "AMD": 1}

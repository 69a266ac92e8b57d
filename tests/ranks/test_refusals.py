"""What several devices cannot do is a typed error on every rank, before anything is shared or trained."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import processes
import pytest
import refused_runs
import torch

import sp_lightning
from sp_lightning.errors import HostMemoryError, OptionError, PeerError, UnsupportedError
from sp_lightning.lightning import several_devices
from sp_lightning.ranks import board, shared_memory
from sp_lightning.ranks.board import Ranks

TOKEN = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"widths": [8, 16]}, "blocks.0.weight"),
        ({"dtype": torch.bfloat16}, "blocks.0.weight"),
        ({"frozen": True}, "blocks.0.bias"),
        ({"widths": [8, 8, 8]}, "4 parameters"),
    ],
)
@pytest.mark.few(1)
def test_another_model_on_one_rank(other, named):
    errors = processes.run(2, refused_runs.unlike_models, [{}, other])
    for rank, error in enumerate(errors):
        assert error.startswith("UnsupportedError: the ranks' models differ"), error
        assert f"rank {rank} has" in error
    assert named in errors[0]
    assert (" 6 parameters, and another one has more or less" in errors[1]) == (named == "4 parameters")


def test_ranks_that_were_refused_in_a_loop_by_hand_no_longer_watch_each_other():
    """Else the first that ended its work would end the others."""
    (first, second), watching, outputs = zip(*processes.run(2, refused_runs.unlike_by_hand), strict=True)
    assert first.startswith("UnsupportedError: the ranks' models differ") and second.startswith("UnsupportedError")
    assert watching == ([], []) and torch.equal(*outputs)


def test_a_weight_whose_memory_another_tensor_has_too():
    """A rank that comes there later may hear of the other one first."""
    errors = [error for error in processes.run(2, refused_runs.shared_bytes) if not error.startswith("PeerError: rank")]
    assert errors
    for error in errors:
        assert error.startswith("UnsupportedError: blocks.1.weight_orig shares its memory with another tensor"), error
        assert error.endswith("or use devices=1, or strategy='ddp'"), error


def test_another_torch_on_one_rank():
    for error in processes.run(2, refused_runs.another_torch):
        assert error.startswith("OptionError: devices must be") and "unlike versions of torch" in error, error


def test_containers_of_one_machine_with_networks_of_their_own():
    """Their ranks could wait for each other's sockets for ever."""
    for error, after in processes.run(2, refused_runs.another_network):
        assert error.startswith("OptionError: devices must be those of one container, or of containers that "), error
        assert "unlike networks of one machine: ('net:[" in error and after < 5, error


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
@pytest.mark.few(1)
def test_a_system_without_memfd(number):
    first, second = processes.run(2, refused_runs.refused_memfd, number)
    assert first.startswith("UnsupportedError: several devices share host memory by memfd"), first
    assert second.startswith("PeerError: rank 0 "), second


def test_a_platform_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UnsupportedError, match="memfd"):
        sp_lightning.SuperpipelineStrategy().parallel_devices = [torch.device("cpu")] * 2


def test_more_memory_than_can_be_mapped():
    descriptor = shared_memory.make(1 << 12)
    with pytest.raises(HostMemoryError, match="cannot map"):
        shared_memory.mapped(shared_memory.MappedRange(descriptor), 1 << 62, 0)
    os.close(descriptor)
    with pytest.raises(HostMemoryError, match="cannot share"):
        shared_memory.make(-1)


def test_more_ranks_than_devices():
    for error in processes.run(2, refused_runs.too_few_devices):
        assert error.startswith("OptionError: devices must be"), error


def test_a_notebook(monkeypatch):
    monkeypatch.setattr(several_devices, "is_interactive", lambda: True)
    strategy = sp_lightning.SuperpipelineStrategy()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.cluster_environment = type("Environment", (), {"creates_processes_externally": False})()
    with pytest.raises(UnsupportedError, match="torchrun"):
        strategy._configure_launcher()


def test_several_devices_of_the_users_choice():
    strategy = sp_lightning.SuperpipelineStrategy(device="cpu")
    with pytest.raises(OptionError, match="device must be"):
        strategy.parallel_devices = [torch.device("cpu")] * 2


MIB = 2**20


def test_a_host_too_small_for_what_the_ranks_share():
    """It needs 288 MiB of weights, as many of gradients, and 72 MiB under way in each rank; both have made a model."""
    found = processes.run(2, refused_runs.little_memory, 40 * MIB)
    for said, lines in found:
        assert said.startswith(
            "HostMemoryError: 2 ranks need 720.35 MiB of host memory without the optimizer's state (weights 288.14 "
            "MiB, wire copies 0 B, gradients 432.21 MiB), but 40.00 MiB are free and 576.28 MiB have their weights"
        ), said
        assert not lines


def test_a_host_too_small_for_gradients_of_each_rank():
    (said, _), _ = processes.run(2, refused_runs.little_memory, 600 * MIB, accumulate_grad_batches=2)
    assert said.startswith("HostMemoryError: 2 ranks need 1.27 GiB"), said


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.seldom
def test_a_host_that_may_be_filled_is_one_warning_of_all_ranks(late):
    """With AdamW's state it would be filled; the step is SGD's, and goes through."""
    found = processes.run(2, refused_runs.little_memory, (450 + 288 * late) * MIB, late)
    assert [said for said, _ in found] == ["", ""]
    (_, [line]), (_, others) = found
    assert not others
    assert line.startswith("superpipeline: training on 2 devices will take")
    assert ("make them in configure_model" in line) == (not late)


@pytest.mark.slow
def test_ranks_whose_weights_do_not_count_have_no_memory_for_them():
    (first, [weight, number]), (second, [other, its_number]) = processes.run(2, refused_runs.drawn_late)
    assert first > 250 * MIB and second < 100 * MIB
    assert torch.equal(weight, other) and torch.equal(number, its_number)


@pytest.mark.parametrize("what", ["whole", *(pytest.param(it, marks=pytest.mark.slow) for it in ("slice", "numpy"))])
def test_a_forked_worker_that_reads_a_weight(what):
    for error in processes.run(2, refused_runs.worker, what):
        assert "forked process" in error, error


@pytest.mark.seldom
def test_a_forked_worker_that_reads_no_weight():
    assert processes.run(2, refused_runs.worker, "nothing") == ["", ""]


# ---- processes that are not of the run


@contextlib.contextmanager
def two_ranks(timeout=60, before=lambda: None):
    """Rank 0 waits for rank 1, which connects after ``before``."""
    found = {}

    def make(rank):
        try:
            found[rank] = Ranks(rank, 2, TOKEN, timedelta(seconds=timeout))
        except Exception as error:
            found[rank] = error

    first = threading.Thread(target=make, args=(0,))
    first.start()
    strangers = before()
    second = threading.Thread(target=make, args=(1,))
    second.start()
    second.join()
    first.join()
    del strangers
    yield found
    for ranks in found.values():
        if isinstance(ranks, Ranks):
            ranks.close()


def test_a_wait_for_what_a_rank_posted_before_it_failed_is_over():
    """Between the look at what is missing and the one at who failed there is time for both."""
    with two_ranks() as found:
        posted = []

        def missing():
            if len(posted) == 1:  # in the wait
                found[1].fail()
            posted.append(1)
            return [] if len(posted) > 2 else [1]

        found[0].wait(missing, "a number")
        with pytest.raises(PeerError, match="rank 1 failed"):
            found[0].wait(lambda: [1], "a number")


def stranger(says=b""):
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until = time.monotonic() + 10
    while True:
        try:
            end.connect(board._address(TOKEN))
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.01)
    if says:
        end.send(says)
    return end


@pytest.mark.quick
@pytest.mark.parametrize(
    "says",
    [
        b"",  # hangs
        b"x",
        board.HELLO.pack(b"another token...", 1, board.DESCRIPTORS),
        board.HELLO.pack(TOKEN, 7, board.LIFE),
        board.HELLO.pack(TOKEN, 1, b"?"),
    ],
)
def test_strangers_keep_nobody_waiting_and_get_nothing(says):
    strangers = []
    began = time.monotonic()
    with two_ranks(before=lambda: strangers.extend(stranger(says) for _ in range(50))) as found:
        assert time.monotonic() - began < 4
        assert all(isinstance(ranks, Ranks) for ranks in found.values()), found
        for end in strangers:
            end.settimeout(5)
            data, descriptors, _, _ = socket.recv_fds(end, 64, 4)
            assert (data, descriptors) == (b"", [])
            end.close()


@pytest.mark.quick
def test_one_who_knows_the_token_cannot_take_the_place_of_a_rank_twice(caplog):
    with two_ranks() as found:
        assert found[0].size == 2
        with pytest.raises(OSError):  # nobody listens any more
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(board._address(TOKEN))


@pytest.mark.quick
def test_a_descriptor_that_a_rank_did_not_take_is_closed():
    with two_ranks() as found:
        found[1]._peers[0].close()
        made = os.memfd_create("made")
        with pytest.raises(PeerError):
            found[0].pass_on(lambda: made)
        with pytest.raises(OSError):
            os.fstat(made)


ANOTHER_USER = """
import os, socket, sys
os.setuid(65534)
end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
end.connect(sys.argv[1].replace("@", chr(0)))
try:
    end.send(bytes.fromhex(sys.argv[2]))
    end.settimeout(5)
    print(len(end.recv(64)))
except OSError:
    print(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_process_of_another_user_gets_nothing(caplog):
    hello = board.HELLO.pack(TOKEN, 1, board.DESCRIPTORS).hex()
    said = []

    def ask():
        stranger().close()  # waits until rank 0 listens
        address = board._address(TOKEN).replace("\0", "@")
        done = subprocess.run([sys.executable, "-c", ANOTHER_USER, address, hello], capture_output=True, text=True)
        said.append(done.stdout.strip() or done.stderr)

    with two_ranks(before=ask) as found:
        assert said == ["0"]
        assert isinstance(found[0], Ranks) and isinstance(found[1], Ranks)
    assert "a process of user 65534" in caplog.text


@pytest.mark.quick
def test_a_rank_that_never_comes_is_named():
    with pytest.raises(PeerError, match="rank 1, rank 2 did not come"):
        Ranks(0, 3, TOKEN, timedelta(seconds=0.3))


@pytest.mark.quick
def test_a_first_rank_that_never_comes_is_named():
    with pytest.raises(PeerError, match="rank 0 did not answer"):
        Ranks(1, 2, TOKEN, timedelta(seconds=0.3))


def test_a_rank_whose_process_ended_before_it_connected_is_named():
    ended = subprocess.Popen([sys.executable, "-c", ""])  # a zombie until the end of this test
    for rank in (0, 1):
        numbers = [os.getpid(), os.getpid()]
        numbers[1 - rank] = ended.pid
        began = time.monotonic()
        with pytest.raises(PeerError, match=f"rank {1 - rank} ended"):
            Ranks(rank, 2, TOKEN, timedelta(seconds=60), numbers)
        assert time.monotonic() - began < 5
    ended.wait()

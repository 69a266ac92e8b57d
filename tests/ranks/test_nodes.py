"""Several nodes train as DDP does over all their ranks, to the last bit: here two parts of this machine's ranks."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta
from unittest import mock

import failing_runs
import lightning as L
import linked_nodes
import loops
import pretended_nodes
import processes
import pytest
import ranked_fabric
import ranked_features
import ranked_parity
import ranked_runs
import refused_runs
import schedules
import torch
import waiting
from families import FAMILIES

import models
import parity
import sp_lightning
from sp_lightning.errors import OptionError, PeerError
from sp_lightning.nodes import arrivals, launched
from sp_lightning.ranks.board import CUT, LATER_S, LEFT, LOST, TO_AGREE

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
OFTEN = ["batch_norm", "mixture_of_experts", "skipped_block", "tied_embedding"]
COVER = parity.pairwise(
    window=[1, 2, 99],
    activations=["keep", "recompute", "offload", "recompute+offload"],
    accumulate=[1, 2],
    clip=[None, ("norm", 0.1), ("value", 0.01)],
    precision=["32-true", "bf16-mixed", "bf16-true"],
    optimizer=["adamw", "sgd", "adafactor", "lbfgs", "two"],
    accelerator=["cpu", "simgpu"],
)
DAILY = 0, 6  # rows that are not slow; in 6 all nodes skip, in one backward, a block that has gradients
TRAITS = [case for case in sorted(models.ZOO) if case not in ranked_parity.NOT_AS_DDP]


def check_loop(size=4, nodes=2, device="cpu", **settings):
    expected = processes.run(size, loops.train, None, **settings)
    compare(expected, processes.run(size, pretended_nodes.run, nodes, loops.train, {"window": 2}, device, **settings))


def compare(expected, found):
    for rank, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        for what, one, other in zip(theirs._fields, theirs, ours, strict=True):
            seen = dict(parity.leaves(other))
            assert {path: parity.difference(leaf, seen.pop(path)) for path, leaf in parity.leaves(one)} == (
                dict.fromkeys(dict(parity.leaves(one)))
            ), f"{what} of rank {rank}"
            assert not seen


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"edits": True, "clip": True}, marks=SLOW),
        {"accumulate": 2, "clip": True, "holds": True},
        pytest.param({"optimizer": "adafactor", "edits": True}, marks=SLOW),
        pytest.param({"optimizer": "foreach", "accumulate": 2}, marks=SLOW),
        pytest.param({"accumulate": 3, "clip": True, "grows_at": 4}, marks=SLOW),
        pytest.param({"renewals": 4}, marks=SLOW),
        pytest.param({"accumulate": 2, "edits": True, "device": "simgpu"}, marks=SLOW),
    ],
)
@pytest.mark.seldom
def test_a_loop_over_two_nodes_of_two_ranks_is_ddp_with_the_tree(settings):
    check_loop(**settings)


def test_a_loop_over_two_nodes_of_one_rank_is_ddp():
    check_loop(size=2, edits=True, accumulate=2)


@pytest.mark.seldom
def test_sums_that_are_slow_to_be_sent_are_sent_as_they_were():
    found = processes.run(2, pretended_nodes.run, 2, waiting.trained_with_slow_sends)
    compare(processes.run(2, loops.train, None), found)


@pytest.mark.parametrize("nodes", [3, *(pytest.param(count, marks=SLOW) for count in (2, 4))])
def test_a_node_sends_all_but_its_share_of_four_bytes_for_each_parameter_twice(nodes):
    for nbytes in processes.run(nodes, pretended_nodes.run, nodes, linked_nodes.message_nbytes_of_steps):
        assert nbytes == pytest.approx(8 * (nodes - 1) / nodes, rel=0.02)


@pytest.mark.seldom
def test_the_next_backward_does_not_write_over_sums_that_are_slow_to_be_sent():
    assert processes.run(2, pretended_nodes.run, 2, waiting.means_with_slow_sums) == [[True] * 3] * 2


def test_messages_come_as_they_were_sent():
    assert processes.run(2, pretended_nodes.run, 2, waiting.messages) == [[True] * 3] * 2


def test_sums_never_wait_behind_parts_that_a_node_does_not_take():
    assert processes.run(2, pretended_nodes.run, 2, waiting.sums_beside_parts) == [(3, True)] * 2


@pytest.mark.seldom
def test_ranks_that_differ_are_seen_on_every_node_also_where_first_ranks_do_not():
    numbers = (1, 1, 1, 1), (1, 2, 1, 2), (1, 1, 2, 2), (1, 1, 1, 2), (3, 3, 3, 3)
    assert processes.run(4, pretended_nodes.run, 2, waiting.alike, *numbers) == [[True, False, False, False, True]] * 4


@pytest.mark.seldom
def test_a_rank_that_is_slow_to_say_farewell_has_left_and_is_not_lost():
    state, _ = processes.run(2, pretended_nodes.run, 2, waiting.state_of_one_that_left)
    assert state == LEFT


@pytest.mark.parametrize(("cut", "expected"), [(True, CUT), (False, LOST)])
@pytest.mark.seldom
def test_a_rank_that_ends_while_it_leaves_is_lost(cut, expected):
    state, _ = processes.run(2, pretended_nodes.run, 2, waiting.state_of_one_that_ends_while_it_leaves, cut)
    assert state == expected


@pytest.mark.seldom
def test_a_rank_that_stopped_because_of_another_one_names_that_one_to_its_peers():
    *_, said = processes.run(4, pretended_nodes.run, 2, waiting.error_of_one_that_waits_for_one_that_stopped)
    assert said == "rank 0 on host0 failed; its own error says why"


@pytest.mark.parametrize(("steps", "fewest"), [((3, 3, 3, 2), 3), pytest.param((2, 3, 3, 3), 0, marks=SLOW)])
@pytest.mark.seldom
def test_a_rank_that_left_too_early_is_named_on_every_node(steps, fewest):
    """The other node waits for a neighbour of it, which stops."""
    found = processes.run(4, pretended_nodes.run, 2, waiting.error_of_a_loop, steps)
    assert found.pop(fewest) == ""
    said = f"rank {fewest} on host{fewest // 2} has left the run while others wait for it"
    assert all(error.startswith(said) and ";" not in error for error in found), found


@pytest.mark.seldom
def test_a_rank_that_left_has_no_threads_that_wait_for_one_that_stays():
    assert processes.run(2, pretended_nodes.run, 2, waiting.threads_after_leaving) == [0, 0]


@pytest.mark.seldom
def test_connections_to_other_nodes_end_where_a_run_does():
    for first, _, last in processes.run(2, pretended_nodes.run, 2, waiting.sockets_after_leaving):
        assert last <= first


@pytest.mark.seldom
def test_all_ranks_of_all_nodes_come_to_a_meeting():
    *others, _ = processes.run(4, pretended_nodes.run, 2, waiting.seconds_at_a_meeting)
    assert min(others) > waiting.SLOW_S / 2


@SLOW
def test_a_loop_over_four_nodes_of_one_rank_is_ddp_with_the_tree():
    check_loop(nodes=4, edits=True, clip=True)


def check(case, row, **options):
    """Compare one row of the cover, but for what Lightning refuses and what has no reference on the CPU."""
    row = dict(row)
    options |= {name: row.pop(name) for name in ("window", "activations")}
    if row["optimizer"] == "two":  # Lightning neither accumulates nor clips for who optimizes by hand
        row |= {"accumulate": 1, "clip": None}
    if row["precision"] == "bf16-mixed" or "random" in models.case(case).tags:
        row["accelerator"] = "cpu"
    if row["optimizer"] == "lbfgs":
        row["clip"] = None
    ranked_parity.check(ranked_runs.fit, case, options, size=4, nodes=2, **row)


@pytest.mark.parametrize("row", [pytest.param(row, marks=[SLOW] * (row not in DAILY)) for row in range(len(COVER))])
@pytest.mark.few(1)
def test_a_trainer_over_two_nodes_is_ddp_with_the_tree(row):
    check(OFTEN[row % len(OFTEN)], COVER[row])


@pytest.mark.parametrize(
    ("case", "row"),
    [pytest.param(case, 5 * number % len(COVER), marks=SLOW) for number, case in enumerate(TRAITS)],
)
def test_a_trainer_over_two_nodes_is_ddp_with_the_tree_for_every_trait(case, row):
    check(case, COVER[row])


@SLOW
@pytest.mark.parametrize(("feature", "options"), [("ema", {"window": 1}), ("swa", {"window": 2})])
def test_averages_of_weights_over_two_nodes_are_those_of_ddp(feature, options):
    ranked_parity.check(ranked_features.run, feature, options, size=4, nodes=2)


@SLOW
@pytest.mark.parametrize(
    "family",
    sorted({*list(FAMILIES)[1::3], "mixtral", "vit", "gpt2", "qwen2_vl"}),  # each equals DDP
)
def test_families_over_two_nodes_are_ddp_with_the_tree(family):
    for library in FAMILIES[family].case.tags:
        pytest.importorskip(library)
    ranked_parity.check(ranked_runs.fit, family, {"window": 2}, size=4, nodes=2, batches=2)


def check_schedules(seeds, count=30, **options):
    found = processes.run(4, pretended_nodes.run, 2, schedules.run, list(seeds), count, **options)
    assert found == [[]] * 4


@pytest.mark.seldom
def test_random_schedules_over_two_nodes_are_the_sum_of_all_ranks():
    check_schedules([0], 10)


@SLOW
@pytest.mark.parametrize("seeds", [range(start, start + 17) for start in (100, 117, 134, 151)])
def test_two_thousand_random_schedules_over_two_nodes_are_the_sum_of_all_ranks(seeds):
    check_schedules(seeds, timeout=900)


@SLOW
def test_ranks_of_two_nodes_that_are_held_up_anywhere_change_nothing():
    check_schedules(range(200, 203), held_up=0.02, timeout=900)


@pytest.mark.parametrize(
    ("loop", "options"),
    [("accumulating", {"window": 1}), *(pytest.param(loop, {"window": 2}, marks=SLOW) for loop in ("gan", "resuming"))],
)
@pytest.mark.seldom
def test_fabric_over_two_nodes_is_ddp_with_the_tree(loop, options):
    ranked_parity.check(ranked_fabric.record, loop, options, size=4, nodes=2)


LIMIT_S = 5
STALL_S = 1.5
PHASES = [
    *(
        "meeting",
        "connecting nodes",
        "forward",
        "backward",
        "between post and sum",
        "sum of nodes",
        "sums of other nodes",
    ),
    *("settle", "agreement of nodes", "in the step", "end of the step", "data"),
    *("promise", "beside backward", "deferred part"),
]
FAILURES = [(phase, way, victim) for phase in PHASES for way in ("raise", "kill") for victim in (0, 2, 3)]
BEFORE_A_BOARD = [("accepting", 2), ("connecting", 3)]
FAILURES += [(phase, way, victim) for phase, victim in BEFORE_A_BOARD for way in ("raise", "kill")]
FAILURES += [(phase, "signal", victim) for phase, victim in (("forward", 3), ("sum of nodes", 0), ("backward", 2))]
NOBODY = [case for case in FAILURES if case[0] == "agreement of nodes" and case[2] == 3]  # first ranks alone agree
EVERY_DAY = {("meeting", "kill", 3), ("forward", "kill", 3), ("forward", "signal", 3), ("sum of nodes", "raise", 2)}


@pytest.mark.parametrize(
    ("phase", "way", "victim"),
    [pytest.param(*case, marks=[] if case in EVERY_DAY else SLOW) for case in FAILURES if case not in NOBODY],
)
@pytest.mark.seldom
def test_all_ranks_of_all_nodes_end_with_an_error_that_names_the_one_that_failed(phase, way, victim):
    with failing_runs.nothing_left():
        slow = victim if phase == "deferred part" else None  # so that something is left for that
        endings = failing_runs.endings(4, phase=phase, way=way, victim=victim, nodes=2, slow=slow)
    struck = endings[victim].struck
    assert struck, f"nothing failed: {endings}"
    for rank, ending in enumerate(endings):
        if rank != victim:
            assert ending.at - struck < LIMIT_S, f"rank {rank}: {ending}"
            assert (ending.error, ending.status) == ("PeerError", 1), f"rank {rank}: {ending}"
            assert f"rank {victim} on host{victim // 2} " in f"{ending.message} ", f"rank {rank}: {ending}"
            assert not any(f"rank {other} on " in ending.message for other in range(4) if other != victim), ending


@pytest.mark.parametrize(
    ("phase", "way", "victim"),
    [
        ("connecting nodes", "kill", 1),
        *(pytest.param("connecting nodes", *case, marks=SLOW) for case in [("raise", 1), ("kill", 0), ("raise", 0)]),
        *(pytest.param("meeting", way, 0, marks=SLOW) for way in ("raise", "kill")),
    ],
)
@pytest.mark.seldom
def test_a_node_of_one_rank_that_ends_before_it_is_connected_is_named(phase, way, victim):
    """No rank beside it tells the others."""
    endings = failing_runs.endings(2, phase=phase, way=way, victim=victim, nodes=2)
    other = endings[1 - victim]
    assert other.error == "PeerError" and other.message.startswith(f"rank {victim} on host{victim} "), endings
    assert other.at - endings[victim].struck < LIMIT_S, endings


@pytest.mark.seldom
def test_a_node_of_one_rank_that_is_killed_is_named_while_a_process_that_it_forked_lives():
    """No rank beside it tells the others, and the forked process had copies of its connections."""
    first, victim = failing_runs.endings(2, phase="forward", way="orphan", victim=1, nodes=2)
    assert (first.error, first.message) == ("PeerError", "rank 1 on host1 ended, or the connection to it did"), first
    assert first.at - victim.struck < LIMIT_S, first


@pytest.mark.parametrize("way", ["kill", pytest.param("raise", marks=SLOW)])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=SLOW), pytest.param(1, marks=SLOW), 2])
def test_a_rank_that_ends_while_torch_connects_the_processes_is_named(victim, way):
    endings = failing_runs.endings(4, phase="joining", way=way, victim=victim, nodes=2)
    struck = endings.pop(victim).struck
    what = "ended before all ranks were connected" if way == "kill" else "failed; its own error says why"
    for ending in endings:
        assert ending.error == "PeerError" and ending.at - struck < LIMIT_S, endings
        assert ending.message == f"rank {victim} on host{victim // 2} {what}", endings


@SLOW
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_stopped_while_torch_connects_the_processes_is_named_after_the_timeout(victim):
    """torch waits without end for the store of a process that is stopped, and names none that it waits for."""
    endings = failing_runs.endings(4, phase="joining", way="stop", victim=victim, nodes=4, timeout=5, longest=40)
    struck = endings.pop(victim).struck
    for ending in endings:
        assert ending.error == "PeerError" and ending.at - struck < 5 + 2 * LIMIT_S, endings
        named = re.findall(r"(?:: |, and )((?:rank \d[^:]*?)+) did not come", ending.message)
        assert named in ([f"rank {victim} on host{victim}"], [f"rank {victim}"]), endings


@SLOW
def test_a_first_rank_that_is_stopped_before_it_meets_the_others_again_is_named():
    """They are connected by torch, and meet in its store, which that process holds."""
    endings = failing_runs.endings(2, phase="meeting", way="stop", victim=0, nodes=2, timeout=5, longest=40)
    said = "the process that holds the store of the process group (rank 0 on host0) does not answer"
    assert (endings[1].error, endings[1].message) == ("PeerError", said), endings


def join(port, timeout=30):
    """Join as the second of two processes."""
    launched.connect_launched("127.0.0.1", port, 1, 2, timedelta(seconds=timeout), mock.Mock())


@contextlib.contextmanager
def silent():
    """Listen at a port, and say nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("listens", [False, True])
def test_a_process_that_waits_for_the_first_one_can_be_interrupted(listens):
    since, interrupt = time.monotonic(), threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    port = silent() if listens else contextlib.nullcontext(processes.free_port())
    with port as at, pytest.raises(KeyboardInterrupt):
        join(at)
    assert time.monotonic() - since < LIMIT_S


def test_a_first_process_that_does_not_answer_is_named_after_the_timeout(monkeypatch):
    monkeypatch.setattr(arrivals, "ANSWER_S", 0.1)
    with silent() as port, pytest.raises(PeerError, match=r", and rank 0 did not come to 127.*no answer came from"):
        join(port, timeout=0.1)


def test_a_port_that_another_process_has_is_refused():
    found = r"MASTER_ADDR:MASTER_PORT must be an address of rank 0's machine, .*, got '127.0.0.1:"
    with silent() as port, pytest.raises(OptionError, match=found):
        launched.connect_launched("127.0.0.1", port, 0, 2, timedelta(seconds=30), mock.Mock())


def test_two_processes_with_one_rank_are_refused():
    """A machine on which NODE_RANK was forgotten would take the place of another one, which waits."""
    lines = launched._LinesOfFirst(3), *(launched._LineToFirst(1, 3, "127.0.0.1") for _ in range(3))
    with contextlib.ExitStack() as closes:
        first, ended, begun_again, another = [closes.enter_context(contextlib.closing(line)) for line in lines]
        assert ended.prepare(first.note) and first.prepare(None)
        ended.close()
        assert begun_again.prepare(first.note) and first.prepare(None)
        assert another.prepare(first.note)
        found = r"NODE_RANK must be another .*'two processes with rank 1, at 127.0.0.1 and 127.0.0.1'"
        with pytest.raises(OptionError, match=found):
            first.prepare(None)


def test_two_first_processes_are_refused():
    store = arrivals.AnsweringStore(torch.distributed.HashStore(), time.monotonic() + 30)
    first, another = (arrivals.Meeting(store, 0, 2) for _ in range(2))
    assert another.come("") is None
    with pytest.raises(OptionError, match=r"NODE_RANK must be another .*'two processes with rank 0, which both"):
        first.come("")


@pytest.mark.parametrize("number", ["2", "-1"])
def test_a_number_of_a_machine_that_there_is_not_is_refused(number, monkeypatch):
    """The first process would wait for the others."""
    monkeypatch.setenv("NODE_RANK", number)
    monkeypatch.setenv("LOCAL_RANK", "0")
    strategy = sp_lightning.SuperpipelineStrategy()
    with pytest.raises(OptionError, match=f"NODE_RANK must be from 0 to 1, as there are num_nodes=2, got {number}"):
        L.Trainer(strategy=strategy, accelerator="cpu", num_nodes=2, logger=False).fit(L.LightningModule())


def test_a_process_that_cannot_reach_the_first_one_names_that_one_alone():
    port = processes.free_port()
    with pytest.raises(PeerError, match=f"rank 3 on .*, and rank 0 did not come to 127.0.0.1:{port} .*refused"):
        launched.connect_launched("127.0.0.1", port, 3, 6, timedelta(seconds=0.3), mock.Mock())


def test_a_process_without_a_line_to_the_first_one_says_why():
    port, line = processes.free_port(), launched._LineToFirst(1, 2, "127.0.0.1")
    assert not line.prepare(f"{port} token 2 host0")
    assert line.error.startswith(f"no line to host0, at 127.0.0.1:{port}: ") and "refused" in line.error


def test_a_process_that_starts_again_waits_also_where_an_earlier_attempt_was_given_up():
    from torch.distributed import HashStore

    store = arrivals.AnsweringStore(HashStore(), time.monotonic() + 30)
    arrivals.Meeting(store, 0, 2).give_up([1])
    later = arrivals.Meeting(store, 1, 2)
    assert later.late() == []
    arrivals.Meeting(store, 0, 2).give_up([1])
    assert later.late() == [1]


def test_a_process_that_the_system_connects_to_itself_leaves_the_port_to_the_first_one(monkeypatch):
    """Linux does so where the port that it gives a socket is the one to connect to."""
    port, connect, made = processes.free_port(), socket.create_connection, []

    def from_the_same_port(address, timeout):
        made.append(connect(address, timeout, source_address=address))
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", from_the_same_port)
    with pytest.raises(TimeoutError, match="nothing listens there"):
        launched._wait_for_store("127.0.0.1", port, time.monotonic())
    assert len(made) == 1
    with socket.socket() as first:
        first.bind(("127.0.0.1", port))


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"half", b""])
def test_a_connection_from_elsewhere_is_not_taken_for_a_rank(greeting, ends):
    """Nor does it keep one waiting."""
    first, other = launched._LinesOfFirst(2), launched._LineToFirst(1, 2, "127.0.0.1")
    with contextlib.closing(first), contextlib.closing(other):
        port = int(first.note.split()[0])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
            if ends:
                stranger.shutdown(socket.SHUT_WR)
            since = time.monotonic()
            assert other.prepare(first.note) and first.prepare(None)
            assert list(first._lines) == [1] and time.monotonic() - since < launched.LINE_S / 2


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["data", "sum of nodes"])
def test_a_rank_that_hangs_on_another_node_is_named_after_the_timeout(phase):
    endings = failing_runs.endings(4, phase=phase, way="hang", victim=3, timeout=5, nodes=2)
    assert endings[3].status == -9  # by its own thread that watches
    for rank, ending in enumerate(endings[:3]):
        assert ending.error == "PeerError" and "rank 3 on host1 " in ending.message, f"rank {rank}: {ending}"
        assert ending.at - endings[3].struck < 5 + 3 * LIMIT_S, f"rank {rank}: {ending}"


@pytest.mark.parametrize("phase", ["data", *(pytest.param(it, marks=SLOW) for it in ("backward", "sum of nodes"))])
@pytest.mark.seldom
def test_a_node_of_which_nothing_comes_any_more_is_lost_after_the_keepalive(phase):
    keepalive = 3
    endings = failing_runs.endings(4, phase=phase, way="stop", victim=2, nodes=2, keepalive=keepalive, longest=30)
    for rank, ending in enumerate(endings[:2]):
        assert ending.error == "PeerError" and "rank 2 on host1 cannot be reached" in ending.message, (
            f"{rank}: {ending}"
        )
        assert keepalive - 1 < ending.at - endings[2].struck < keepalive + LIMIT_S, f"rank {rank}: {ending}"


def test_a_keepalive_that_no_machine_could_keep_is_refused():
    strategy = sp_lightning.SuperpipelineStrategy(keepalive=timedelta(seconds=0.5))
    for error, _, reads in processes.run(2, refused_runs.unlike_nodes, [0, 1], "nothing", strategy=strategy):
        assert error.startswith("OptionError: keepalive must be one second or longer") and not reads, error


def test_a_run_without_a_failure_ends_at_once():
    endings = failing_runs.endings(4, phase="none", way="", victim=None, nodes=2)
    assert [ending.status for ending in endings] == [0] * 4


# --- What is refused, on every rank and before data is read


@pytest.mark.parametrize(
    ("what", "named", "advice"),
    [
        ("torch", f"unlike versions of torch: host0 {torch.__version__}, host1 0.1", "install the same on each"),
        ("sp_lightning", "unlike versions of sp_lightning: host0 ", "install the same on each"),
        ("CPU", "unlike kinds of CPU, as torch's kernels tell them: host0 ", "set ATEN_CPU_CAPABILITY"),
        ("threads", "unlike numbers of torch's threads: host0 1, host1 7", "set OMP_NUM_THREADS"),
        (
            "interface",
            "host1: GLOO_SOCKET_IFNAME=none0: ",
            "GLOO_SOCKET_IFNAME must be an interface that",
        ),
    ],
)
@pytest.mark.few(1)
def test_machines_that_differ_are_refused(what, named, advice):
    for error, after, reads in processes.run(2, refused_runs.unlike_nodes, [0, 1], what):
        assert error.startswith("OptionError: ") and named in error and advice in error, error
        assert after < 20 and not reads


def test_a_sum_depends_on_the_number_of_threads():
    """So nodes with other numbers of them are refused: each computes optimizers' sums by itself."""
    values, before = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    sums = set()
    try:
        for threads in range(1, 9):
            torch.set_num_threads(threads)
            sums.add(values.sum().item())
    finally:
        torch.set_num_threads(before)
    assert len(sums) > 1


@pytest.mark.parametrize(("nodes", "listed"), [([0, 0, 0, 1], "host0 3, host1 1"), ([0, 1, 0, 1], "host0 2, host1 2")])
@pytest.mark.few(1)
def test_machines_with_other_numbers_of_ranks_or_in_turns_are_refused(nodes, listed):
    for error, _, reads in processes.run(4, refused_runs.unlike_nodes, nodes, "nothing"):
        assert error.startswith("OptionError: num_nodes") and f"ranks by machine: {listed}" in error, error
        assert not reads
    for error in processes.run(4, refused_runs.unlike_group, nodes, "nothing"):
        assert error.startswith("OptionError: num_nodes") and f"ranks by machine: {listed}" in error, error


def test_one_machine_where_two_are_said_is_refused():
    for error, _, reads in processes.run(2, refused_runs.unlike_nodes, [0, 0], "nothing"):
        assert error.startswith("OptionError: num_nodes must be 1, the number of machines on which"), error
        assert not reads


def test_processes_that_expect_other_numbers_of_each_other_are_refused():
    """Each would wait for ranks that there are not."""
    for error in processes.run(2, refused_runs.unlike_sizes, [2, 3]):
        assert error.startswith("OptionError: num_nodes must be the same on every machine, with as many devices, "), (
            error
        )
        assert error.endswith("got 'num_nodes * devices = 3 on rank 1, and 2 on rank 0'"), error


@pytest.mark.parametrize("run", [pretended_nodes.trainer, pretended_nodes.late_words])
def test_ranks_that_differ_in_their_edits_are_named_by_their_number_among_all(run):
    """Also by a rank that hears that another one failed before it hears its last word."""
    said = r"(?s)rank 0 on host0 changed none\. .*rank 1 on host1 changed net\.stem\.weight and 0 others\. "
    with pytest.raises(processes.RankFailed, match=said):
        processes.run(2, run, 2, ranked_features.run, "scaled gradient of one rank", {"window": 2})


def test_machines_with_a_group_in_a_loop_by_hand_that_differ_are_refused():
    for error in processes.run(2, refused_runs.unlike_group, [0, 1], "threads"):
        assert error.startswith("OptionError: ") and "host0 1, host1 7" in error, error


def test_models_that_differ_from_machine_to_machine_are_refused():
    for said, _, forward in processes.run(2, pretended_nodes.run, 2, refused_runs.unlike_by_hand):
        assert said.startswith("UnsupportedError: the models of the machines differ: rank "), said
        assert forward.shape == (4,)  # the next run works


@pytest.mark.seldom
def test_a_machine_that_does_not_come_is_named_after_the_timeout():
    first, second, *_ = processes.run(4, refused_runs.without_a_node, 3)
    for rank, error in enumerate((first, second)):
        assert error.startswith(f"PeerError: rank {rank} on host0 waited "), error
        assert "and rank 2, rank 3 did not come to 127.0.0.1:" in error and "MASTER_ADDR" in error, error


# --- Over a link of its own, which only root can make


@pytest.fixture
def link():
    if not linked_nodes.can_link():
        pytest.skip("needs root, ip netns and tc")
    with linked_nodes.linked("100mbit") as made:
        yield made


@SLOW
def test_two_networks_with_a_slow_link_give_the_bits_of_ddp(link, tmp_path):
    expected = processes.run(4, loops.train, None, clip=True)
    found = linked_nodes.results(linked_nodes.start(link, "train", tmp_path), tmp_path)
    compare(expected, [loops.Found(*one) for one in found])


@SLOW
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (4, 1)])
def test_what_a_node_sends_over_a_slow_link_is_little_more(nodes, local, tmp_path):
    if not linked_nodes.can_link():
        pytest.skip("needs root, ip netns and tc")
    with linked_nodes.linked("100mbit", nodes) as link:
        found = linked_nodes.results(linked_nodes.start(link, "nbytes_of_steps", tmp_path, local), tmp_path)
    for nbytes in found:
        assert nbytes == pytest.approx(8 * (nodes - 1) / nodes, rel=0.02)


@SLOW
def test_nodes_that_send_to_each_other_at_once_do_not_take_turns(link, tmp_path):
    """The link carries 12.5 MB/s in each direction; over one connection for both, each gets half of that."""
    for rate in linked_nodes.results(linked_nodes.start(link, "bytes_per_s", tmp_path, local=1), tmp_path):
        assert 0.75 * 12.5e6 < rate < 12.5e6


@SLOW
def test_a_link_that_carries_nothing_now_and_then_changes_nothing(link, tmp_path):
    expected = processes.run(4, loops.train, None, clip=True)
    ranks, stalls = linked_nodes.start(link, "train", tmp_path), 0
    while any(rank.poll() is None for rank in ranks):
        link.stall()
        time.sleep(STALL_S)
        link.go_on()
        time.sleep(3 * STALL_S)  # packets are sent again after up to twice the time that they were not
        stalls += 1
    compare(expected, [loops.Found(*one) for one in linked_nodes.results(ranks, tmp_path)])
    assert stalls > 2


def start_steps(link, work, folder):
    """Start ranks that train without end; return them once each has stepped."""
    ranks, until = linked_nodes.start(link, work, folder), time.monotonic() + 120
    while len(list(folder.glob("*.mark"))) < len(ranks) and time.monotonic() < until:
        time.sleep(0.05)
    return ranks


@SLOW
def test_a_link_that_carries_nothing_any_more_ends_all_ranks_after_the_timeout(link, tmp_path):
    ranks = start_steps(link, "until_the_timeout", tmp_path)
    link.stall()
    since = time.monotonic()
    for rank, (error, at) in enumerate(linked_nodes.results(ranks, tmp_path)):
        other = 2 - rank // 2 * 2  # the first rank of the other node
        assert error.startswith("PeerError: ") and "did not come" in error, f"rank {rank}: {error}"
        assert f"rank {other} on " in error or f"rank {other + 1} on " in error, f"rank {rank}: {error}"
        assert linked_nodes.TIMEOUT_S - 1 < at - since < linked_nodes.TIMEOUT_S + TO_AGREE * LATER_S + LIMIT_S, error


@SLOW
def test_a_link_that_goes_down_ends_all_ranks_after_the_keepalive(link, tmp_path):
    ranks = start_steps(link, "until_the_link_ends", tmp_path)
    link.go_down()
    down = time.monotonic()
    for rank, (error, at) in enumerate(linked_nodes.results(ranks, tmp_path)):
        assert error.startswith("PeerError") and f"rank {2 - rank // 2 * 2} on " in error, error
        assert "cannot be reached" in error and at - down < linked_nodes.KEEPALIVE_S + LIMIT_S, (error, at - down)

"""The host optimizer: the bits of torch's default loop, and nothing of it to be seen."""

import copy
import functools
import io
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import forks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from sp_lightning.nodes.shares import divided
from sp_lightning.optim import native
from sp_lightning.optim import pieces as host
from sp_lightning.optim.pieces import fuse, step_in_pieces

PIECE = 1 << 17
SIZES = (5 * PIECE + 3, 4 * PIECE + 1, 4 * PIECE, 4 * PIECE - 1, PIECE - 1, 7)
RANGES = (70003, 1000, 257, 5)
SMALL = 2 * host.LINE  # a piece for tests that are not about sizes

STATELESS = {"lr": 0.1}
# Each elementwise class of torch with the options that change which kernels run.
CASES = [
    (optim.SGD, STATELESS),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.Adam, {"amsgrad": True, "betas": (0.3, 0.99)}),
    (optim.AdamW, {"lr": 0.01}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
    (optim.AdamW, {"lr": torch.tensor(0.01), "betas": (torch.tensor(0.9), torch.tensor(0.99))}),
    (optim.NAdam, {}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    (optim.RAdam, {"betas": (0.9, 0.8)}),
    (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.Rprop, {}),
    (optim.ASGD, {"t0": 1, "weight_decay": 0.1}),
]


def name_of(value):
    return value.__name__ if isinstance(value, type) else ",".join(value)


def wild(generator, size, dtype):
    """Values over many magnitudes, with subnormals, zeros of both signs, infinities and NaNs."""
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-4, 4, (size,), generator=generator)
    values[::97] *= torch.finfo(dtype).smallest_normal
    for offset, special in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"))):
        values[offset + 11 :: 1009] = special
    return values.to(dtype)


@pytest.fixture(autouse=True)
def pieces_alone(monkeypatch):
    """Leave large parameters to pieces."""
    monkeypatch.setattr(native, "FEWEST", sys.maxsize)


@functools.lru_cache(maxsize=8)  # the plain side's numbers are the other side's, and those of the next class
def wild_numbers(seed, sizes, dtypes):
    generator = torch.Generator().manual_seed(seed)
    return [wild(generator, size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)]


def parameters(sizes, dtype=torch.float32):
    return [nn.Parameter(values.clone()) for values in wild_numbers(0, tuple(sizes), (dtype,) * len(sizes))]


def train(optimizer, steps=4, seed=1):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sizes, dtypes = (tuple(param.numel() for param in params), tuple(param.dtype for param in params))
    for step in range(steps):
        for param, values in zip(params, wild_numbers(100 * seed + step, sizes, dtypes), strict=True):
            param.grad = values.clone().view_as(param)
        optimizer.step()


def saved(optimizer):
    """Everything a checkpoint holds, and the weights, to the byte."""
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), [group["params"] for group in optimizer.param_groups]], file)
    return file.getvalue()


def both(make, attach, drive=train):
    """The same training by the default loop, then with ``attach``; what each leaves behind."""
    plain = make()
    drive(plain)
    attached = make()
    handle = attach(attached)
    drive(attached)
    handle.close()
    return saved(plain), saved(attached)


def check_bits(cls, options, dtype=torch.float32, sizes=SIZES, piece=PIECE):
    def make():
        return cls(parameters(sizes, dtype), **copy.deepcopy(options))

    plain, pieces = both(make, lambda optimizer: step_in_pieces(optimizer, piece))
    assert plain == pieces


@pytest.fixture
def cuts(monkeypatch):
    """The sizes of the parameters that were stepped in pieces."""
    sizes = []

    def cut(param, *others):
        sizes.append(param.numel())
        return original(param, *others)

    original = host._cut
    monkeypatch.setattr(host, "_cut", cut)
    return sizes


@pytest.mark.parametrize(("cls", "options"), CASES, ids=name_of)
@pytest.mark.few(1)
def test_pieces_have_the_bits_of_the_default_loop(cls, options, cuts):
    check_bits(cls, options)
    steps_with_state = 0 if options == STATELESS else 4 if cls is optim.Adagrad else 3  # most make it in the first
    assert cuts == [*SIZES[:3]] * steps_with_state


def test_every_class_that_steps_in_pieces_is_proven():
    assert {cls for cls, _ in CASES} == host.ELEMENTWISE


def train_in_ranges(cls, options, count):
    """Train as many parts of each parameter as ranks own; return what `saved` says of them, put together."""
    ranges = [[divided(size, rank, count) for size in RANGES] for rank in range(count)]
    whole = cls(parameters(RANGES), **options)
    optimizers = [
        cls([p.detach()[part].clone() for p, part in zip(parameters(RANGES), parts, strict=True)], **options)
        for parts in ranges
    ]
    for step in range(3):
        values = wild_numbers(100 + step, RANGES, (torch.float32,) * len(RANGES))
        for optimizer, parts in zip(optimizers, ranges, strict=True):
            for param, value, part in zip(optimizer.param_groups[0]["params"], values, parts, strict=True):
                param.grad = value[part].clone()
            optimizer.step()
    for param, *parts in zip(*(optimizer.param_groups[0]["params"] for optimizer in [whole, *optimizers]), strict=True):
        param.data = torch.cat(parts)
        states = [optimizer.state[part] for optimizer, part in zip(optimizers, parts, strict=True)]
        for key, value in states[0].items():
            is_cut = torch.is_tensor(value) and value.dim()
            whole.state[param][key] = torch.cat([state[key] for state in states]) if is_cut else value
    return saved(whole)


@pytest.mark.parametrize(
    ("cls", "options", "kernels"),
    [
        pytest.param(cls, options, kernels, id=f"{name_of(cls)}-{name_of(options)}-{name_of(kernels)}")
        for cls, options in CASES
        for kernels in ({"foreach": False}, {"foreach": True}, {"fused": True})
        if (cls in host.FUSED or "fused" not in kernels)  # others have no such kernels
        and not (kernels.get("foreach") and torch.is_tensor(options.get("lr")))  # which torch refuses
        and not (kernels.get("foreach") and options.get("nesterov"))  # which writes to gradients
    ],
)
def test_ranges_of_ranks_have_the_bits_of_whole_parameters(cls, options, kernels):
    """Where `is_elementwise` says so (ranks/sharded_step.py, Rule 1)."""
    plain = cls(parameters(RANGES), **copy.deepcopy(options), **kernels)
    assert host.is_elementwise(plain, plain.param_groups[0])
    train(plain, steps=3)
    assert saved(plain) == train_in_ranges(cls, {**copy.deepcopy(options), **kernels}, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("cls", "options"), [CASES[1], CASES[7], CASES[14], CASES[18]], ids=name_of)
@pytest.mark.few(2)
def test_pieces_have_the_bits_of_the_default_loop_in_every_precision(cls, options, dtype, cuts):
    check_bits(cls, options, dtype, SIZES[:1])
    assert cuts == [SIZES[0]] * 3


def with_threads(threads, call):
    """Call a function of this module in a process with so many threads."""
    code = f"import torch, test_pieces; torch.set_num_threads({threads}); test_pieces.{call}"
    done = forks.run(code)
    assert done.returncode == 0, done.stderr


def check_bits_with_threads(in_turn, most, flushes=False):
    native.FEWEST, host.MOST_THREADS = sys.maxsize, most
    if not in_turn:
        host.can_share_operators = lambda: False
    torch.set_flush_denormal(flushes)  # threads that begin from here on do as this one
    threads, teams, by_threads = torch.get_num_threads(), [], host._left_by_threads
    host._left_by_threads = lambda *args: teams.append(args[4:]) or by_threads(*args)
    sizes = [threads * 5 * host.GRAIN, threads * 5 * host.GRAIN + 1, threads * 7 * host.GRAIN - 101, 7]
    for (cls, options), dtype in ((CASES[1], torch.bfloat16), (CASES[7], torch.bfloat16), (CASES[14], torch.float32)):
        check_bits(cls, options, dtype, sizes, host.GRAIN)
    assert set(teams) == ({(min(threads, most), threads // most or 1)} if in_turn else set())
    assert torch.get_num_threads() == threads


# Half precision and NaNs show where a kernel split the work.
@pytest.mark.parametrize(
    "threads, in_turn, most",
    [
        (2, True, 8),
        (4, True, 2),
        (3, False, 8),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, True, 8), (2, True, 1), (2, False, 8)]),
    ],
)
@pytest.mark.seldom
def test_pieces_have_the_bits_of_the_default_loop_with_threads(threads, in_turn, most):
    with_threads(threads, f"check_bits_with_threads({in_turn}, {most})")


@pytest.mark.seldom
def test_threads_that_take_turns_flush_denormals_as_the_caller_does():
    with_threads(2, "check_bits_with_threads(True, 8, flushes=True)")


def refuse_in_turn():
    native.FEWEST = sys.maxsize
    optimizer = optim.AdamW(parameters([2 * 5 * host.GRAIN] * 2))
    step_in_pieces(optimizer, host.GRAIN)
    train(optimizer, 2)
    before = saved(optimizer)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    param.grad = param.grad.to_sparse()
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        optimizer.step()
    assert saved(optimizer) == before
    optimizer.param_groups[0]["eps"] = "small"
    with pytest.raises(TypeError):
        train(optimizer, 1)
    optimizer = optim.AdamW(parameters([2 * 5 * host.GRAIN] * 2))
    step_in_pieces(optimizer, host.GRAIN)
    with torch.inference_mode():  # the mode of the caller's thread alone
        train(optimizer, 2)


def test_threads_that_take_turns_raise_what_torch_does():
    with_threads(2, "refuse_in_turn()")


def share_counts_of_steps():
    native.FEWEST = sys.maxsize
    sizes = [2 * 5 * host.GRAIN, 2 * 5 * host.GRAIN + 3]

    def drive(optimizer):
        train(optimizer, 1)
        first, second = optimizer.param_groups[0]["params"]
        optimizer.state[second]["step"] = optimizer.state[first]["step"]
        train(optimizer, 2)

    plain, pieces = both(lambda: small(sizes=sizes), lambda optimizer: step_in_pieces(optimizer, host.GRAIN), drive)
    assert plain == pieces


def test_threads_do_not_take_turns_where_parameters_share_a_count_of_steps():
    with_threads(2, "share_counts_of_steps()")


def test_operators_of_other_threads_are_shared_as_before():
    """The number that a thread sets for its own operators holds for no other thread, also not for a later one."""
    with_threads(3, "share_in_one_thread()")


def share_in_one_thread():
    assert host.can_share_operators()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(host.share_operators, 1).result()
        assert thread.submit(torch.get_num_threads).result() == 1
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(torch.get_num_threads).result() == 3
    assert torch.get_num_threads() == 3


def ragged_ends(lengths, threads):
    """(start, end) of what kernels treat apart: the last elements of each thread's share, short of a whole line."""
    ends, offset = set(), 0
    for length in lengths:
        sharers = min(threads, -(-length // host.GRAIN))
        share = -(-length // sharers)
        for start in range(0, length, share):
            end = min(start + share, length)
            if (end - start) % host.LINE:
                ends.add((offset + end - (end - start) % host.LINE, offset + end))
        offset += length
    return ends


@given(st.integers(1, 1 << 25), st.integers(1, 128), st.sampled_from([1, 1000, SMALL, 1 << 15, PIECE]))
def test_pieces_end_raggedly_where_the_whole_does(numel, threads, piece):
    for sharers in {1, -(-threads // 8), threads}:
        lengths = host.piece_lengths(numel, threads, sharers, max(piece, numel // 1000))
        assert sum(lengths) == numel
        assert ragged_ends(lengths, sharers) == ragged_ends([numel], threads)


def test_pieces_do_not_exceed_their_size():
    assert host.piece_lengths(5 * PIECE + 3, 1, 1, PIECE) == (*[PIECE] * 5, 3)
    assert host.piece_lengths(6 * PIECE, 2, 2, PIECE) == (2 * PIECE,) * 3
    assert host.piece_lengths(6 * PIECE, 2, 1, PIECE) == (PIECE,) * 6
    assert host.piece_lengths(2 * PIECE + 2 * 40_000 + 2, 2, 2, PIECE) == (PIECE + 39_936, 65, PIECE + 39_936, 65)


def small(cls=optim.AdamW, sizes=(8 * SMALL + 5, 3), **options):
    return cls(parameters(sizes), **options)


def in_small_pieces(optimizer):
    return step_in_pieces(optimizer, SMALL)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
def test_other_classes_of_torch_run_as_they_are(name):
    optimizer = getattr(optim, name)([nn.Parameter(torch.zeros(4, 4))])
    assert step_in_pieces(optimizer) is None
    assert fuse(optimizer) is None


def test_a_subclass_runs_as_it_is():
    class Mine(optim.AdamW):
        pass

    assert step_in_pieces(small(Mine)) is None
    assert fuse(small(Mine)) is None


@pytest.mark.parametrize("flag", ["foreach", "fused", "differentiable"])
def test_a_group_with_a_flag_of_its_own_runs_as_it_is(flag, cuts):
    def make():
        first, second = parameters((8 * SMALL, 8 * SMALL + 1))
        return optim.SGD([{"params": [first], flag: True}, {"params": [second]}], lr=0.1, momentum=0.9)

    plain, pieces = both(make, in_small_pieces)
    assert plain == pieces
    assert cuts == [8 * SMALL + 1] * 3


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_a_flag_set_to_false_asks_for_the_loop(flag, cuts):
    plain, pieces = both(lambda: small(**{flag: False}), in_small_pieces)
    assert plain == pieces
    assert cuts


def test_groups_keep_options_of_their_own(cuts):
    def make():
        first, second = parameters((8 * SMALL, 6 * SMALL))
        groups = [{"params": [first], "lr": 0.5, "weight_decay": 0.0}, {"params": [second], "betas": (0.5, 0.6)}]
        return optim.AdamW(groups)

    plain, pieces = both(make, in_small_pieces)
    assert plain == pieces
    assert cuts == [8 * SMALL, 6 * SMALL] * 3


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_a_dense_layout_is_stepped_in_memory_order(layout, cuts):
    def arrange(tensor):
        if layout == "transposed":
            return tensor.view(32, -1).t()
        return tensor.view(8, 4, 16, 16).contiguous(memory_format=torch.channels_last)

    def make():
        return optim.AdamW([nn.Parameter(arrange(parameters([8192])[0].detach()))])

    def drive(optimizer):
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            (param,) = optimizer.param_groups[0]["params"]
            param.grad = arrange(wild(generator, 8192, torch.float32))
            optimizer.step()

    plain, pieces = both(make, in_small_pieces, drive)
    assert plain == pieces
    assert cuts == [8192] * 2


def gaps():
    return nn.Parameter(torch.ones(64, 128)[:, ::2])


def other_order():
    param = nn.Parameter(torch.ones(64, 64))
    param.grad = torch.arange(4096.0).view(64, 64).t()
    return param


def complex_numbers():
    return nn.Parameter(torch.ones(4096, dtype=torch.complex64))


def without_common_memory_order():
    return optim.AdamW([gaps(), other_order(), complex_numbers()])


def step_thrice(optimizer):
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param) if param.grad is None else param.grad
    for _ in range(3):
        optimizer.step()


def test_what_has_no_common_memory_order_is_left_whole(cuts):
    plain, pieces = both(without_common_memory_order, in_small_pieces, step_thrice)
    assert plain == pieces
    assert not cuts


class Mine(torch.Tensor):
    """A tensor whose operations may be anything."""


@pytest.mark.parametrize("param_class, grad_class", [(Mine, torch.Tensor), (torch.Tensor, Mine)])
def test_a_subclass_of_tensor_is_left_whole(param_class, grad_class, cuts):
    param = torch.ones(8 * SMALL).as_subclass(param_class)
    optimizer = optim.AdamW([param])
    step_in_pieces(optimizer, SMALL)
    for _ in range(2):
        param.grad = torch.ones(8 * SMALL).as_subclass(grad_class)
        optimizer.step()
    assert not cuts


def test_an_opaque_layout_is_left_whole(cuts):
    param = torch.ones(8, SMALL).to_mkldnn()
    param.grad = torch.ones(8, SMALL).to_mkldnn()
    optimizer = optim.SGD([param], lr=0.5, momentum=0.5)
    step_in_pieces(optimizer, SMALL)
    optimizer.step()
    optimizer.step()
    assert torch.equal(param.to_dense(), torch.full((8, SMALL), -0.25))
    assert not cuts


def test_a_gradient_of_another_type_is_left_whole(cuts):
    def drive(optimizer):
        (param,) = optimizer.param_groups[0]["params"]
        param.grad_dtype = torch.float64
        param.grad = torch.rand(8 * SMALL, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            optimizer.step()

    plain, pieces = both(lambda: small(optim.SGD, sizes=[8 * SMALL], momentum=0.9), in_small_pieces, drive)
    assert plain == pieces
    assert not cuts


@pytest.mark.parametrize("attach", [in_small_pieces, fuse])
def test_a_lazily_negated_gradient_is_read_with_its_sign(attach):
    def drive(optimizer):
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = torch.ones(8 * SMALL, dtype=torch.complex64).mul(1j).conj().imag
        assert param.grad.is_neg()
        for _ in range(3):
            optimizer.step()

    plain, attached = both(lambda: small(optim.SGD, sizes=[8 * SMALL], momentum=0.9), attach, drive)
    assert plain == attached


def test_what_is_not_on_the_host_is_left_whole(cuts):
    optimizer = optim.AdamW([nn.Parameter(torch.empty(8 * SMALL, device="meta"))])
    step_in_pieces(optimizer, SMALL)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.empty_like(param)
    optimizer.step()
    optimizer.step()
    assert not cuts


def test_a_parameter_without_gradient_is_skipped(cuts):
    def drive(optimizer):
        train(optimizer, 2)
        optimizer.param_groups[0]["params"][0].grad = None
        optimizer.step()

    plain, pieces = both(lambda: small(sizes=(8 * SMALL, 6 * SMALL)), in_small_pieces, drive)
    assert plain == pieces
    assert cuts == [8 * SMALL, 6 * SMALL, 6 * SMALL]


@pytest.mark.parametrize("which", [0, 1])
def test_a_sparse_gradient_is_refused_in_torchs_words(which):
    optimizer = small()
    step_in_pieces(optimizer, SMALL)
    train(optimizer, 2)
    before = saved(optimizer)
    param = optimizer.param_groups[0]["params"][which]
    param.grad = torch.ones_like(param).to_sparse()
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        optimizer.step()
    assert saved(optimizer) == before


@pytest.mark.parametrize("sizes", [(8 * SMALL, 3), (3, 8 * SMALL), (8 * SMALL, 8 * SMALL)])
def test_a_step_count_shared_by_two_parameters_counts_as_in_the_loop(sizes):
    def drive(optimizer):
        train(optimizer, 1)
        first, second = optimizer.param_groups[0]["params"]
        optimizer.state[second]["step"] = optimizer.state[first]["step"]
        train(optimizer, 3)

    plain, pieces = both(lambda: small(sizes=sizes), in_small_pieces, drive)
    assert plain == pieces


def test_state_that_is_no_tensor_is_kept_as_it_is(cuts):
    def drive(optimizer):
        train(optimizer, 1)
        optimizer.state[optimizer.param_groups[0]["params"][0]]["note"] = "mine"
        train(optimizer, 2)

    plain, pieces = both(small, in_small_pieces, drive)
    assert plain == pieces
    assert not cuts


def test_a_momentum_buffer_is_created_whole_beside_state_of_the_user(cuts):
    def make():
        optimizer = small(optim.SGD, sizes=[8 * SMALL], momentum=0.9)
        (param,) = optimizer.param_groups[0]["params"]
        optimizer.state[param]["mine"] = torch.zeros(8 * SMALL)
        return optimizer

    plain, pieces = both(make, in_small_pieces)
    assert plain == pieces
    assert cuts == [8 * SMALL] * 3


def test_the_closure_runs_once_and_its_loss_is_returned():
    def drive(optimizer):
        losses = []

        def closure():
            optimizer.zero_grad()
            loss = sum((param.nan_to_num(0, 0, 0) ** 2).mean() for param in optimizer.param_groups[0]["params"])
            loss.backward()
            return loss

        for _ in range(2):
            losses += [optimizer.step(closure).item(), optimizer.step(closure=closure).item()]
        optimizer.param_groups[0]["losses"] = losses

    plain, pieces = both(small, in_small_pieces, drive)
    assert plain == pieces


def test_a_step_without_closure_returns_none():
    optimizer = small()
    step_in_pieces(optimizer, SMALL)
    assert optimizer.step() is None


def test_a_learning_rate_scheduler_works_as_before():
    def drive(optimizer):
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for seed in range(3):
            train(optimizer, 1, seed)
            scheduler.step()

    plain, pieces = both(small, in_small_pieces, drive)
    assert plain == pieces


def test_a_grad_scaler_skips_infinite_gradients_as_before(cuts):
    def drive(optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))  # as a training step does; makes the scale
        for factor in (1.0, float("inf"), 2.0):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.full_like(param, factor)
            scaler.step(optimizer)
            scaler.update()

    plain, pieces = both(small, in_small_pieces, drive)
    assert plain == pieces
    assert len(cuts) == 1


def test_a_compiled_step_is_left_to_the_compiler(cuts):
    optimizer = small()
    train(optimizer, 2)
    step_in_pieces(optimizer, SMALL)
    torch.compile(optimizer.step, backend="eager")()
    assert not cuts


def test_hooks_of_the_user_see_the_optimizer_as_it_is(cuts):
    seen = []
    optimizer = small()
    (large, _) = optimizer.param_groups[0]["params"]

    def look(stage):
        def hook(self, args, kwargs):
            params = self.param_groups[0]["params"]
            seen.append((stage, self is optimizer, params[0] is large, *args[1:], *kwargs.values()))
            if stage == "after":
                assert args[0] is optimizer

        return hook

    optimizer.register_step_pre_hook(look("before"))
    optimizer.register_step_post_hook(look("after"))
    step_in_pieces(optimizer, SMALL)
    train(optimizer, 1)
    optimizer.step(closure=dict)
    optimizer.step(list)
    assert seen == [
        ("before", True, True),
        ("after", True, True),
        ("before", True, True, dict),
        ("after", True, True, dict),
        ("before", True, True, list),
        ("after", True, True, list),
    ]
    assert len(cuts) == 2


def test_a_pre_hook_registered_later_may_change_the_gradients():
    def drive(optimizer):
        def halve(optimizer, args, kwargs):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = param.grad / 2

        optimizer.register_step_pre_hook(halve)
        train(optimizer)

    plain, pieces = both(small, in_small_pieces, drive)
    assert plain == pieces


def test_hooks_on_parameters_do_not_fire_in_a_step():
    optimizer = small()
    fired = []
    for param in optimizer.param_groups[0]["params"]:
        param.register_hook(fired.append)
        param.register_post_accumulate_grad_hook(fired.append)
    step_in_pieces(optimizer, SMALL)
    train(optimizer)
    assert fired == []


def test_autograd_sees_that_a_step_changed_a_weight():
    optimizer = small(sizes=[8 * SMALL])
    (param,) = optimizer.param_groups[0]["params"]
    step_in_pieces(optimizer, SMALL)
    train(optimizer, 1)
    loss = (param * param).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_checkpoint_crosses_over_in_the_middle(cuts):
    def drive(optimizer):
        train(optimizer, 2)
        state = copy.deepcopy(optimizer.state_dict())
        train(optimizer, 1)
        optimizer.load_state_dict(state)
        train(optimizer, 2)

    plain, pieces = both(small, in_small_pieces, drive)
    assert plain == pieces
    assert len(cuts) == 4


def test_a_group_added_later_is_stepped_in_pieces_too(cuts):
    def drive(optimizer):
        train(optimizer, 2)
        optimizer.add_param_group({"params": parameters([6 * SMALL]), "lr": 0.5})
        train(optimizer, 2)

    plain, pieces = both(small, in_small_pieces, drive)
    assert plain == pieces
    assert cuts == [8 * SMALL + 5] * 3 + [6 * SMALL]


@pytest.mark.parametrize("attach", [in_small_pieces, fuse])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_of_the_optimizer_is_plain(attach, copied, cuts):
    optimizer = small()
    attach(optimizer)
    train(optimizer, 2)
    cuts.clear()
    twin = copied(optimizer)
    train(twin, 2)
    assert not cuts
    assert list(twin.__dict__) == list(copied(small()).__dict__)


@pytest.mark.parametrize("attach", [in_small_pieces, fuse])
def test_close_leaves_the_optimizer_as_it_was(attach):
    optimizer = small()
    before = {name: copy.copy(value) for name, value in optimizer.__dict__.items()}
    handle = attach(optimizer)
    handle.close()
    handle.close()
    assert optimizer.__dict__ == before


def test_attaching_twice_cuts_once(cuts):
    optimizer = small()
    handles = [in_small_pieces(optimizer), in_small_pieces(optimizer)]
    train(optimizer, 2)
    assert len(cuts) == 1
    handles[0].close()
    train(optimizer, 1)
    assert len(cuts) == 2


def test_an_exception_in_a_step_leaves_nothing_of_the_pieces_behind(cuts):
    optimizer = small()
    step_in_pieces(optimizer, SMALL)
    train(optimizer, 2)
    groups, state = optimizer.param_groups, optimizer.state
    (group,), params, tensors = groups, groups[0]["params"], [dict(state[param]) for param in groups[0]["params"]]
    group["eps"] = "not a number"
    with pytest.raises(TypeError):
        optimizer.step()
    group["eps"] = 1e-8
    assert optimizer.param_groups is groups and groups == [group] and group["params"] is params
    assert optimizer.state is state and list(map(id, state)) == list(map(id, params))
    for param, before in zip(params, tensors, strict=True):
        assert all(state[param][key] is value for key, value in before.items())
    train(optimizer, 1)
    assert len(cuts) == 3


FUSED_CASES = [
    (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
    (optim.Adagrad, {}),
]


def train_fused_by_hand(optimizer):
    """What ``fuse`` stands for: the first step, which makes the state, in the loop; the others fused."""
    fused_from = 0 if isinstance(optimizer, optim.Adagrad) else 1
    for seed in range(4):
        for group in optimizer.param_groups:
            group["fused"] = seed >= fused_from
        train(optimizer, 1, seed)
    for group in optimizer.param_groups:
        group["fused"] = None


def train_by_seeds(optimizer):
    for seed in range(4):
        train(optimizer, 1, seed)


@pytest.mark.parametrize(("cls", "options"), FUSED_CASES, ids=name_of)
def test_fuse_has_the_bits_of_the_fused_kernels_and_leaves_no_trace(cls, options):
    by_hand = small(cls, **copy.deepcopy(options))
    train_fused_by_hand(by_hand)
    fused = small(cls, **copy.deepcopy(options))
    handle = fuse(fused)
    train_by_seeds(fused)
    handle.close()
    assert saved(fused) == saved(by_hand)


def test_every_class_that_is_fused_is_proven():
    assert {cls for cls, _ in FUSED_CASES} == host.FUSED


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": False}, {"foreach": True}])
def test_fuse_leaves_groups_alone_that_chose(options):
    plain, attached = both(lambda: small(**options), fuse)
    assert plain == attached


def test_fuse_leaves_alone_what_the_kernels_would_misread():
    plain, attached = both(without_common_memory_order, fuse, step_thrice)
    assert plain == attached


def test_fuse_takes_on_a_parameter_whose_first_gradient_comes_late():
    optimizer = small(optim.SGD, sizes=(9, 8), momentum=0.9)
    fuse(optimizer)
    first, second = optimizer.param_groups[0]["params"]
    first.grad = torch.ones(9)
    optimizer.step()
    second.grad = torch.ones(8)
    optimizer.step()
    assert [list(optimizer.state[param]) for param in (first, second)] == [["momentum_buffer"]] * 2
    assert optimizer.state[second]["momentum_buffer"].tolist() == [1.0] * 8

"""Model code on tensors without data: what it sees, which kernels and casts are counted, what it can not ask for."""

import pytest
import torch
import torch.nn.functional as F
import wrapped
from torch import nn
from torch._subclasses import FakeTensorMode

from sp_lightning.tracing.fake_kernels import FP32, FP32_RESULT, LOWER, PROMOTED, Attention, attention_kernel
from sp_lightning.tracing.fake_tensors import FakeTensors, Unknown
from sp_lightning.tracing.memory_tracker import MemoryTracker

HALF = torch.bfloat16


def saved_by(run, *tensors):
    """Bytes of the distinct storages that autograd keeps."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run(*tensors)
    assert kept.requires_grad
    return sum(storages.values())


def test_nothing_has_memory_and_everything_says_it_is_on_the_cpu():
    with FakeTensors("cuda"):
        x = torch.zeros(2**20, 2**20)
        assert (x.device.type, x.is_cuda, x.is_meta, (x @ x).device.type) == ("cpu", False, False, "cpu")
    assert x.is_meta


def test_integers_have_values_through_views_and_writes():
    with FakeTensors("cuda"):
        x = torch.arange(6).view(2, 3)
        x[0, 1:] += 10
        assert (x.t().tolist(), int(x.max()), x.nonzero().shape) == ([[0, 3], [11, 4], [12, 5]], 12, (5, 2))


def test_a_mask_of_known_values_says_how_much_it_chooses():
    with (pretence := FakeTensors("cuda")):
        mask = pretence.adopt(torch.tensor([True, False, True]))
        x = torch.randn(3, 1000)
        assert (x[mask].shape, x.masked_select(mask[:, None]).shape) == ((2, 1000), (2000,))


def test_lists_as_indices_have_values_too():
    with FakeTensors("cuda"):
        x = torch.arange(6).view(2, 3)
        assert (x[:, [-1, 0]].tolist(), 4 in x[[1]], x[[]].shape) == ([[2, 0], [5, 3]], True, (0, 3))
        x[[0, 1], [0, 1]] = 9
        assert x.tolist() == [[9, 1, 2], [3, 9, 5]]


def test_masks_of_scores_have_no_values_which_each_layer_would_copy():
    tokens = 2048
    with FakeTensors("cuda") as context:
        ids = torch.arange(tokens).repeat(1024, 1)
        positions = torch.arange(tokens)
        mask = (positions[None] <= positions[:, None])[None, None]
        copies = [mask.logical_not() for _ in range(80)]
        assert int(ids.sum()) == 1024 * tokens * (tokens - 1) // 2
        storages = context._known_values._known.values()
        assert len(copies) == 80 and sum(storage.nbytes() for storage in storages) < 2 * ids.nbytes


def test_expanded_values_are_adopted():
    with (pretence := FakeTensors("cuda")):
        mask = pretence.adopt(torch.tensor([[1], [2]]).expand(2, 5))
        assert mask.tolist() == [[1] * 5, [2] * 5]
        assert torch.empty_strided((2, 3), (0, 1), dtype=torch.long).stride() == (0, 1)


def test_a_mask_of_floats_that_are_all_ones_has_values():
    with FakeTensors("cuda"):
        mask = torch.ones(8, 512)
        assert mask.to(torch.bool).all().item() and mask.bool().sum().item() == 8 * 512


class TellsItsDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        assert (grad.device.type, grad.is_meta) == ("cpu", False)
        return grad


def test_in_backward_everything_is_on_the_cpu_too():
    checks = dict(torch.utils.checkpoint._allowed_determinism_checks_to_fns)
    with FakeTensors("cuda"):
        TellsItsDevice.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert torch.utils.checkpoint._allowed_determinism_checks_to_fns == checks


def test_what_depends_on_unknown_numbers_is_an_error_that_names_the_operator():
    with FakeTensors("cuda"):
        x = torch.randn(1000)
        with pytest.raises(Unknown, match="nonzero has no result without data"):
            (x > 0).nonzero()
        with pytest.raises(Unknown, match=r"shape \(1000,\) is read as numbers"):
            x.tolist()


def test_a_write_of_something_unknown_makes_known_values_unknown():
    with FakeTensors("cuda"):
        x = torch.zeros(4, dtype=torch.long)
        x += torch.randn(1000).argmax()
        with pytest.raises(Unknown, match="_local_scalar_dense"):
            x[0].item()


def test_random_numbers_of_the_process_are_left_alone():
    before = torch.get_rng_state()
    with FakeTensors("cuda"):
        torch.randint(9, (3,))
    assert torch.equal(before, torch.get_rng_state())


# Casts


def test_what_cudas_autocast_casts_is_cast_here():
    theirs = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    theirs = {name for name in theirs if name.startswith("aten::") and "imname" not in name and "names" not in name}
    ours = {f"aten::{name}" for name in LOWER + FP32 + PROMOTED + FP32_RESULT}
    others = "scaled_dot_product_attention _scaled_dot_product_flash_attention _cudnn_rnn cudnn_convolution"
    others += " cudnn_convolution_transpose binary_cross_entropy linalg_matrix_sqrth"
    assert theirs - ours == {f"aten::{name}" for name in others.split()} & theirs
    assert ours - theirs <= {"aten::rms_norm"}  # in older ones


def operators(x, w):
    yield "linear", F.linear(x, w)
    yield "matmul", x @ w
    yield "softmax of half", x.to(HALF).softmax(-1)
    yield "layer_norm of half", F.layer_norm(x.to(HALF), x.shape[-1:])
    yield "sum of half", x.to(HALF).sum()
    yield "cross_entropy of half", F.cross_entropy(x.to(HALF), x.softmax(-1))
    yield "pow of half", x.to(HALF).pow(2)
    yield "gelu of half", F.gelu(x.to(HALF))
    yield "add", x.to(HALF) + x
    yield "einsum", torch.einsum("ij,jk->ik", x, w)
    yield "vector_norm of half", torch.linalg.vector_norm(x.to(HALF))
    yield "addcmul of both", torch.addcmul(x, x.to(HALF), x)
    yield "prod of half", x.to(HALF).prod(0)


def test_types_under_autocast_are_cudas():
    with FakeTensorMode():
        x, w = torch.randn(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", HALF)
        try:
            theirs = {name: out.dtype for name, out in operators(x, w)}
        finally:
            torch.set_autocast_enabled("cuda", False)
    with FakeTensors("cuda", HALF):
        ours = {name: out.dtype for name, out in operators(torch.randn(8, 8), torch.randn(8, 8))}
    assert ours == theirs


def test_without_autocast_nothing_is_cast():
    with FakeTensors("cuda"):
        assert (torch.randn(2, 2) @ torch.randn(2, 2)).dtype is torch.float32


def test_model_code_can_turn_autocast_off():
    with FakeTensors("cuda", HALF):
        x = torch.randn(2, 2)
        with torch.autocast(device_type=x.device.type, enabled=False):
            assert (x @ x).dtype is torch.float32


def test_other_threads_and_later_code_are_not_touched():
    with FakeTensors("cuda", HALF):
        pass
    x = torch.randn(4, 4, requires_grad=True)
    assert (x @ x).dtype is torch.float32
    assert F.dropout(x, 0.5).grad_fn.name() == "MulBackward0"


# Kernels


def test_attention_on_cuda_keeps_inputs_output_and_logsumexp():
    with FakeTensors("cuda"):
        q, k, v = (torch.randn(2, 8, 2048, 64, dtype=HALF, requires_grad=True) for _ in range(3))
        kept = saved_by(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), q, k, v)
    exact = 4 * 2 * 8 * 2048 * 64 * 2 + 2 * 8 * 2048 * 4
    assert exact <= kept <= exact + 1024  # and the state of a random generator


@pytest.mark.parametrize("keys", [8, 2])
def test_attention_takes_as_many_products_with_fewer_heads_of_keys(keys):
    tally = MemoryTracker(lambda: "all")
    with (pretence := FakeTensors("cuda")):
        pretence.observe = tally.observe
        q, k, v = (torch.randn(2, heads, 256, 64, dtype=HALF, requires_grad=True) for heads in (8, keys, keys))
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=keys < 8).sum().backward()
    assert tally.visits[-1].flops == (2 + 5) * 2 * (2 * 8 * 256 * 256 * 64)


@pytest.mark.simgpu
@pytest.mark.parametrize("masked", [False, True])
def test_attention_over_2048_tokens_is_planned_as_it_runs(masked):
    import simgpu  # noqa: F401

    def peak(run, read):
        q = torch.zeros(1, 2, 2048, 32, requires_grad=True, device=device)
        mask = torch.zeros(1, 1, 2048, 2048, device=device) if masked else None
        run(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward())
        return read()

    device = torch.device("simgpu", 0)
    run_nbytes = peak(lambda step: step(), lambda: torch.accelerator.max_memory_allocated())
    device = None
    with (pretence := FakeTensors("simgpu")):
        tally = MemoryTracker(lambda: "all")
        pretence.observe = tally.observe
        planned = peak(lambda step: step(), lambda: tally.visits[0].nbytes)
    assert planned == pytest.approx(run_nbytes, rel=0.05)


@pytest.mark.simgpu
def test_to_ask_a_device_at_hand_which_attention_it_picks_draws_none_of_its_random_numbers():
    import simgpu  # noqa: F401

    before = torch.get_device_module("simgpu").get_rng_state()
    with FakeTensors("simgpu"):
        q = torch.zeros(1, 2, 8, 24, requires_grad=True)  # of a width that nobody asked about before
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert torch.equal(torch.get_device_module("simgpu").get_rng_state(), before)


@pytest.mark.parametrize(
    "target, asked, kernel",
    [
        ("cuda", Attention(HALF, 64), "flash"),
        ("cuda", Attention(HALF, 512), "efficient"),
        ("cuda", Attention(HALF, 64, masked=True), "efficient"),
        ("cuda", Attention(torch.float32, 64), "efficient"),
        ("cuda", Attention(torch.float32, 64, grouped=True), "math"),
        ("cuda", Attention(torch.float64, 64), "math"),
        ("cuda", Attention(HALF, 0), "math"),
        ("cpu", Attention(torch.float32, 64, masked=True), "cpu"),
        ("cpu", Attention(torch.float32, 64, drops=True), "math"),
        ("mps", Attention(HALF, 64), "math"),
    ],
)
def test_the_kernel_that_a_device_picks(target, asked, kernel):
    assert attention_kernel(target, asked) == kernel


@pytest.mark.parametrize("target, mask_nbytes", [("cuda", 1), ("cpu", 4)])
def test_dropout_keeps_the_mask_that_the_target_makes(target, mask_nbytes):
    with FakeTensors(target):
        x = torch.randn(1024, requires_grad=True)
        assert saved_by(lambda x: F.dropout(x, 0.5), x) == 1024 * mask_nbytes


def test_a_layer_in_a_layer_is_reached_too():
    with FakeTensors("cuda"):
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        kept = saved_by(layer, torch.randn(1, 2048, 64, requires_grad=True))
    assert kept < 2048 * 2048 * 4 * 4  # the scores of four heads


def test_a_weight_that_consists_of_tensors_is_made_and_used_without_data():
    with FakeTensors("cuda") as tensors:
        layer = torch.nn.Linear(8, 4)
        wrapped.coded(layer)
        seen = []
        tensors.observe = lambda func, args, kwargs, out: seen.append(func)
        out = layer(torch.ones(2, 8))
    assert type(layer.weight) is wrapped.Coded and isinstance(layer.weight, torch.nn.Parameter)
    assert all(part.is_meta for part in wrapped.parts(layer.weight))
    assert out.is_meta and out.shape == (2, 4)
    assert {torch.ops.aten.to.dtype, torch.ops.aten.mul.Tensor} <= set(seen)  # by which its class makes plain numbers

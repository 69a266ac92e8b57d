"""That every model of the zoo runs, is deterministic, and has the trait it is there for."""

import subprocess
import sys
from collections import Counter

import lightning as L
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import models
from models import ZOO, ZooModule

TRAITS_WITHOUT_SOME_GRADIENTS = {"skipped_block", "mixture_of_experts"}


def build(name, seed=0):
    case = models.case(name)
    for library in case.tags & {"transformers", "torchvision"}:
        pytest.importorskip(library)
    torch.manual_seed(seed)
    return case, case.make()


def backward(case, net, index=0, seed=1):
    torch.manual_seed(seed)
    loss = case.loss(net, case.batch(index))
    loss.backward()
    return loss.detach()


def to_device(tree, device):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)


def assert_equal(expected, got):
    expected, got = tree_leaves(expected), tree_leaves(got)
    assert len(expected) == len(got) > 0
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def count_calls(net):
    """Counts forward calls by module name, recomputation included."""
    calls = Counter()
    for name, module in net.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    return calls


def trainer(**options):
    return L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


# --- What holds for every case.


@pytest.mark.slow
def test_listing_the_zoo_imports_neither_transformers_nor_torchvision():
    program = "import sys, lightning; before = set(sys.modules); import models; print(*(set(sys.modules) - before))"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {models.__file__.rsplit('/', 1)[0]!r}); {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    roots = {name.split(".")[0] for name in result.stdout.split()}
    assert "models" in roots and not roots & {"transformers", "torchvision"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_equal_seeds_give_equal_nets_losses_and_gradients(name):
    case, first = build(name)
    _, second = build(name)
    assert_equal(first.state_dict(), second.state_dict())
    assert all(tensor.device.type == "cpu" for tensor in first.state_dict().values())
    assert_equal(backward(case, first), backward(case, second))
    for (path, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)), path


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_a_batch_depends_on_its_number_alone(name):
    batch = models.case(name).batch
    before = torch.get_rng_state()
    expected = batch(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    batch(1)
    assert_equal(expected, batch(0))
    leaves = zip(tree_leaves(expected), tree_leaves(batch(1)), strict=True)
    assert any(not torch.equal(a, b) for a, b in leaves if isinstance(a, torch.Tensor))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in TRAITS_WITHOUT_SOME_GRADIENTS])
def test_every_trained_parameter_gets_a_gradient(name):
    case, net = build(name)
    for index in range(2):  # stochastic depth may drop a block for a whole batch
        backward(case, net, index, seed=index)
    for path, parameter in net.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.any())
        assert has_gradient == parameter.requires_grad, path


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_equal_nets_predict_equal_tensors(name):
    predictions = []
    for case, net in (build(name), build(name)):  # two, for a prediction may write weights
        net.eval()
        with torch.inference_mode():
            predictions.append(case.predict(net, case.batch(0)))
    expected, got = predictions
    assert all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(expected))
    assert_equal(expected, got)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_random_tag_tells_whether_forward_draws(name):
    case, net = build(name)
    before = torch.get_rng_state()
    case.loss(net, case.batch(0))
    assert ("random" in case.tags) != torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_writes_tag_tells_whether_forward_writes_weights(name):
    case, net = build(name)
    before = {path: parameter.detach().clone() for path, parameter in net.named_parameters()}
    case.loss(net, case.batch(0))
    changed = any(not torch.equal(before[path], parameter) for path, parameter in net.named_parameters())
    assert ("writes" in case.tags) == changed


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if "autocast" in ZOO[name].tags])
def test_trains_under_autocast(name):
    case, net = build(name)
    with torch.autocast("cpu", torch.bfloat16):
        loss = case.loss(net, case.batch(0))
    loss.backward()
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    assert loss.isfinite() and gradients and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.slow
@pytest.mark.simgpu
@pytest.mark.parametrize("name", ZOO)
def test_runs_on_a_device_as_on_the_cpu(name):
    case, expected = build(name)
    _, net = build(name)
    net.to("simgpu")
    torch.manual_seed(1)
    loss = case.loss(net, to_device(case.batch(0), "simgpu"))
    loss.backward()
    # The simulated device computes an LSTM from its elementary operations, which round elsewhere.
    rounding = 1e-4 if name == "lstm" else 0
    torch.testing.assert_close(loss.detach().cpu(), backward(case, expected), rtol=rounding, atol=rounding)
    for a, b in zip(expected.parameters(), net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=rounding, atol=rounding)
    net.eval()
    with torch.inference_mode():
        predictions = case.predict(net, to_device(case.batch(0), "simgpu"))
    assert {leaf.device.type for leaf in tree_leaves(predictions)} == {"simgpu"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_lightning_fits_validates_and_predicts(name):
    case, _ = build(name)
    module = ZooModule(case)
    before = {path: parameter.detach().clone() for path, parameter in module.named_parameters()}
    runner = trainer(limit_train_batches=2)
    runner.fit(module, models.loader(case, 2), models.loader(case, 1))
    assert {"loss", "val_loss"} <= set(runner.callback_metrics)
    assert any(not torch.equal(before[path], parameter) for path, parameter in module.named_parameters())
    predictions = runner.predict(module, models.loader(case, 2))
    assert len(predictions) == 2 and all(leaf.isfinite().all() for leaf in tree_leaves(predictions))


# --- The module, its optimizers and its data.


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "two"])
@pytest.mark.parametrize("name", ["mlp", "mixture_of_experts", "clip"])
def test_every_optimizer_trains(name, optimizer):
    case, _ = build(name)
    module = ZooModule(case, optimizer)
    before = {path: parameter.detach().clone() for path, parameter in module.named_parameters()}
    trainer().fit(module, models.loader(case, 2), models.loader(case, 1))
    changed = {path for path, parameter in module.named_parameters() if not torch.equal(before[path], parameter)}
    untouched = {path for path in before if "experts" in path}
    assert set(before) - untouched <= changed


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "two"])
def test_the_implementation_is_stated_for_every_optimizer(optimizer, foreach):
    made = ZooModule(models.case("mlp"), optimizer, foreach=foreach).configure_optimizers()
    for optimizer in made if isinstance(made, list) else [made]:
        assert optimizer.defaults["foreach"] is foreach and not optimizer.defaults.get("fused", False)
        assert optimizer.defaults.get("fused", False) is not None


@pytest.mark.slow
def test_two_optimizers_share_the_parameters_out_between_them():
    module = ZooModule(models.case("mlp"), "two")
    first, second = (optimizer.param_groups[0]["params"] for optimizer in module.configure_optimizers())
    assert {*map(id, first), *map(id, second)} == {*map(id, module.parameters())}
    assert not {*map(id, first)} & {*map(id, second)}


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "fused"), [("lion", False), ("adafactor", True)])
def test_an_optimizer_that_is_not_there_is_refused(optimizer, fused):
    module = ZooModule(models.case("mlp"), optimizer, fused=fused)
    with pytest.raises(ValueError, match=f"no optimizer '{optimizer}'"):
        module.configure_optimizers()


@pytest.mark.slow
def test_the_loader_gives_the_batches_in_order():
    case = models.case("keyword_arguments")
    batches = list(models.loader(case, 3))
    assert_equal([case.batch(index) for index in range(3)], batches)

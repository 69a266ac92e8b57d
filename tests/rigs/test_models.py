"""That every model of the zoo runs, is deterministic, and has the trait it is there for."""

import dataclasses
import subprocess
import sys
from collections import Counter

import lightning as L
import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
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


@pytest.mark.parametrize("name", ZOO)
def test_equal_seeds_give_equal_nets_losses_and_gradients(name):
    case, first = build(name)
    _, second = build(name)
    assert_equal(first.state_dict(), second.state_dict())
    assert all(tensor.device.type == "cpu" for tensor in first.state_dict().values())
    assert_equal(backward(case, first), backward(case, second))
    for (path, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)), path


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


@pytest.mark.parametrize("name", [name for name in ZOO if name not in TRAITS_WITHOUT_SOME_GRADIENTS])
def test_every_trained_parameter_gets_a_gradient(name):
    case, net = build(name)
    for index in range(2):  # stochastic depth may drop a block for a whole batch
        backward(case, net, index, seed=index)
    for path, parameter in net.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.any())
        assert has_gradient == parameter.requires_grad, path


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


@pytest.mark.parametrize("name", ZOO)
def test_the_random_tag_tells_whether_forward_draws(name):
    case, net = build(name)
    before = torch.get_rng_state()
    case.loss(net, case.batch(0))
    assert ("random" in case.tags) != torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ZOO)
def test_the_writes_tag_tells_whether_forward_writes_weights(name):
    case, net = build(name)
    before = {path: parameter.detach().clone() for path, parameter in net.named_parameters()}
    case.loss(net, case.batch(0))
    changed = any(not torch.equal(before[path], parameter) for path, parameter in net.named_parameters())
    assert ("writes" in case.tags) == changed


@pytest.mark.parametrize("name", [name for name in ZOO if "autocast" in ZOO[name].tags])
def test_trains_under_autocast(name):
    case, net = build(name)
    with torch.autocast("cpu", torch.bfloat16):
        loss = case.loss(net, case.batch(0))
    loss.backward()
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    assert loss.isfinite() and gradients and all(gradient.isfinite().all() for gradient in gradients)


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


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "two"])
def test_the_implementation_is_stated_for_every_optimizer(optimizer, foreach):
    made = ZooModule(models.case("mlp"), optimizer, foreach=foreach).configure_optimizers()
    for optimizer in made if isinstance(made, list) else [made]:
        assert optimizer.defaults["foreach"] is foreach and not optimizer.defaults.get("fused", False)
        assert optimizer.defaults.get("fused", False) is not None


def test_two_optimizers_share_the_parameters_out_between_them():
    module = ZooModule(models.case("mlp"), "two")
    first, second = (optimizer.param_groups[0]["params"] for optimizer in module.configure_optimizers())
    assert {*map(id, first), *map(id, second)} == {*map(id, module.parameters())}
    assert not {*map(id, first)} & {*map(id, second)}


@pytest.mark.parametrize(("optimizer", "fused"), [("lion", False), ("adafactor", True)])
def test_an_optimizer_that_is_not_there_is_refused(optimizer, fused):
    module = ZooModule(models.case("mlp"), optimizer, fused=fused)
    with pytest.raises(ValueError, match=f"no optimizer '{optimizer}'"):
        module.configure_optimizers()


def test_the_loader_gives_the_batches_in_order():
    case = models.case("keyword_arguments")
    batches = list(models.loader(case, 3))
    assert_equal([case.batch(index) for index in range(3)], batches)


# --- The traits. Those that a tag states are tested with the tags.


def test_tied_embedding_and_head_are_one_parameter():
    _, net = build("tied_embedding")
    assert net.head.weight is net.embedding.weight


def test_only_the_prefix_is_frozen():
    _, net = build("frozen_prefix")
    frozen = {path for path, parameter in net.named_parameters() if not parameter.requires_grad}
    assert frozen == {path for path, _ in net.named_parameters() if path.startswith(("stem", "blocks.0", "blocks.1"))}


def test_adapted_blocks_hold_frozen_and_trained_parameters():
    _, net = build("adapters")
    for block in net.blocks:
        assert {parameter.requires_grad for parameter in block.parameters()} == {True, False}


def test_repeated_blocks_are_visited_three_times_each():
    case, net = build("repeated_blocks")
    calls = count_calls(net)
    case.predict(net, case.batch(0))
    assert (calls["blocks.0"], calls["blocks.1"]) == (3, 3)


def test_the_shared_block_is_in_three_places():
    case, net = build("shared_block")
    assert net.blocks[0] is net.blocks[2] is net.blocks[4]
    calls = count_calls(net)
    case.predict(net, case.batch(0))
    assert (calls["blocks.0"], calls["blocks.1"], calls["blocks.3"]) == (3, 1, 1)


def test_blocks_are_skipped_in_training_and_get_no_gradient():
    case, net = build("skipped_block")
    ran = Counter()
    for index in range(8):
        net.zero_grad()
        backward(case, net, index, seed=index)
        ran.update(path for path, block in net.blocks.named_children() if block.up.weight.grad is not None)
    assert all(0 < ran[path] < 8 for path in "0123")


def test_no_block_is_skipped_in_evaluation():
    case, net = build("skipped_block")
    calls = count_calls(net.eval())
    case.predict(net, case.batch(0))
    assert all(calls[f"blocks.{index}"] == 1 for index in range(4))


@pytest.mark.parametrize("index", range(4))
def test_some_expert_of_each_block_gets_no_token_and_no_gradient(index):
    case, net = build("mixture_of_experts")
    backward(case, net, index)
    for block in net.blocks:
        used = [expert.weight.grad is not None for expert in block.experts]
        assert any(used) and not all(used)


@pytest.mark.parametrize(("name", "buffer"), [("batch_norm", "running_mean"), ("spectral_norm", "_u")])
def test_forward_updates_buffers(name, buffer):
    case, net = build(name)
    before = {path: tensor.clone() for path, tensor in net.named_buffers()}
    case.loss(net, case.batch(0))
    changed = {path for path, tensor in net.named_buffers() if not torch.equal(before[path], tensor)}
    assert sum(path.endswith(buffer) for path in changed) == 4


def test_the_largest_stage_is_four_hundred_times_the_smallest():
    _, net = build("uneven_convnet")
    sizes = [sum(parameter.numel() for parameter in stage.parameters()) for stage in net.stages]
    assert sizes == sorted(sizes) and sizes[-1] > 400 * sizes[0]


def test_blocks_take_keywords_and_other_things_than_tensors():
    case, net = build("keyword_arguments")
    seen = []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args[1], kwargs)), with_kwargs=True)
    case.predict(net, case.batch(1))
    assert [scale for scale, _ in seen] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert all(kwargs["activation"] == "tanh" for _, kwargs in seen)
    assert [kwargs["shift"] is None for _, kwargs in seen] == [True, False, True, False]
    assert all(isinstance(kwargs["extras"]["bias"], torch.Tensor) for _, kwargs in seen)


def test_blocks_return_a_dataclass():
    case, net = build("dataclass_output")
    outputs = []
    for block in net.blocks:
        block.register_forward_hook(lambda _, args, output: outputs.append(output))
    case.predict(net, case.batch(0))
    assert len(outputs) == 4 and all(dataclasses.is_dataclass(output) for output in outputs)


def test_the_auxiliary_loss_leaves_through_an_attribute():
    case, net = build("auxiliary_attribute")
    loss, batch = backward(case, net), case.batch(0)
    assert all(block.auxiliary_loss.grad_fn is not None for block in net.blocks)
    assert loss > models.classification(net, batch)


def test_the_embedding_is_used_outside_its_own_forward():
    case, net = build("weight_used_outside")
    backward(case, net)
    absent = torch.ones(models.VOCABULARY, dtype=torch.bool)
    absent[case.batch(0)["input_ids"]] = False
    assert absent.any() and net.embedding.weight.grad[absent].any()


def test_the_weight_on_the_context_is_not_saved_through_autograd():
    case, net = build("weight_on_context")
    saved = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.add(tensor.untyped_storage().data_ptr()) or tensor, lambda tensor: tensor
    ):
        case.loss(net, case.batch(0)).backward()
    assert net.blocks[0].norm.weight.data_ptr() in saved
    assert not saved & {block.weight.data_ptr() for block in net.blocks}


@pytest.mark.parametrize("name", ["method_entry", "children_only"])
def test_the_blocks_own_forward_is_never_called(name):
    case, net = build(name)
    calls = count_calls(net)
    case.predict(net, case.batch(0))
    assert {calls[f"blocks.{index}"] for index in range(4)} == {0}
    assert {calls[f"blocks.{index}.norm"] for index in range(4)} == {1}


def test_nested_lists_hold_blocks_and_a_none():
    _, net = build("nested_lists")
    kinds = [[type(block).__name__ for block in stage] for stage in net.blocks]
    assert kinds == [["Block", "NoneType", "Block"], ["Block", "Block", "Block"]]


def test_there_is_a_net_without_containers():
    _, net = build("no_module_list")
    assert not any(isinstance(module, (nn.ModuleList, nn.Sequential)) for module in net.modules())


def test_the_lstm_keeps_its_weights_twice():
    _, net = build("lstm")
    for block in net.blocks:
        assert block.lstm._flat_weights[0] is block.lstm.weight_ih_l0


def test_attention_uses_its_output_projection_without_calling_it():
    case, net = build("multihead_attention")
    calls = count_calls(net)
    backward(case, net)
    assert calls["blocks.0.attention"] == 1 and calls["blocks.0.attention.out_proj"] == 0
    assert net.blocks[0].attention.out_proj.weight.grad.any()


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.update([function.overloadpacket.__name__])
        return function(*args, **(kwargs or {}))


def test_the_encoder_takes_another_path_in_evaluation():
    case, net = build("transformer_encoder")
    with Operators() as training:
        case.loss(net, case.batch(0))
    net.eval()
    with torch.no_grad(), Operators() as evaluation:
        case.predict(net, case.batch(0))
    assert training.names["_transformer_encoder_layer_fwd"] == 0
    assert evaluation.names["_transformer_encoder_layer_fwd"] == 3


@pytest.mark.parametrize(("name", "moves"), [("rescaled_weight", True), ("rescaled_data", False)])
def test_weights_are_rescaled_with_and_without_moving_their_version(name, moves):
    case, net = build(name)
    weight = net.blocks[0].weight
    version = weight._version
    case.loss(net, case.batch(0))
    assert torch.allclose(weight.norm(dim=1), torch.ones(1)) and (weight._version != version) is moves


def test_the_embedding_is_renormed_in_evaluation_too():
    case, net = build("max_norm_embedding")
    net.eval()
    before = net.embedding.weight.detach().clone()
    with torch.inference_mode():
        case.predict(net, case.batch(0))
    assert not torch.equal(before, net.embedding.weight)


def test_backward_enters_the_first_pass_through_the_cache_alone():
    case, net = build("side_state")
    outputs = []
    net.blocks[-1].register_forward_hook(lambda _, args, output: (output.retain_grad(), outputs.append(output))[0])
    backward(case, net)
    assert [output.grad is None for output in outputs] == [True, False]


def test_the_normed_weight_is_no_parameter():
    _, net = build("weight_norm")
    assert isinstance(net.blocks[0].up.weight, torch.Tensor)
    assert "weight" not in dict(net.blocks[0].up.named_parameters())


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("checkpoint", "blocks.1.up"),
        ("checkpoint_reentrant", "blocks.1.up"),
        ("llama_checkpoint", "model.layers.1.mlp"),
        ("llama_checkpoint_reentrant", "model.layers.1.mlp"),
    ],
)
def test_checkpointed_blocks_are_computed_again_in_backward(name, block):
    case, net = build(name)
    calls = count_calls(net)
    loss = case.loss(net, case.batch(0))
    assert calls[block] == 1
    loss.backward()
    assert calls[block] == 2


@pytest.mark.parametrize("name", ["checkpoint", "llama_checkpoint"])
def test_only_reentrant_checkpoints_are_autograd_functions(name):
    def operations(net, case):
        seen, todo = set(), [case.loss(net, case.batch(0)).grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo.extend(edge for edge, _ in node.next_functions)
        return {node.name() for node in seen}

    case, net = build(name)
    reentrant_case, reentrant_net = build(f"{name}_reentrant")
    assert "CheckpointFunctionBackward" not in operations(net, case)
    assert "CheckpointFunctionBackward" in operations(reentrant_net, reentrant_case)


def test_the_gradient_penalty_is_part_of_the_loss_in_training_only():
    case, net = build("gradient_penalty")
    batch = case.batch(0)
    assert case.loss(net, batch) > models.classification(net, batch)
    with torch.inference_mode():
        assert torch.equal(case.loss(net, batch), models.classification(net, batch))


def test_albert_visits_one_layer_four_times():
    case, net = build("albert")
    calls = count_calls(net)
    case.predict(net, case.batch(0))
    assert calls["albert.encoder.albert_layer_groups.0.albert_layers.0"] == 4


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("gpt2", ["lm_head.weight", "transformer.wte.weight"]),
        ("bert", ["cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"]),
        ("t5", ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]),
    ],
)
def test_transformers_ties_its_embeddings(name, paths):
    _, net = build(name)
    assert len({id(net.get_parameter(path)) for path in paths}) == 1


def test_mixtral_runs_its_experts_one_by_one():
    _, net = build("mixtral")
    assert net.config._experts_implementation == "eager"

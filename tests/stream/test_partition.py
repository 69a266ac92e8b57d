"""Where the model is cut: literal units for literal trees, and what holds for every tree."""

from itertools import pairwise

import pytest
import torch
import torch.testing._internal.two_tensor
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sp_lightning.errors import PartitionError
from sp_lightning.stream.partition import partition


def names(units):
    return [unit.name for unit in units]


def root_names(unit):
    return [name for name, _ in unit.modules]


def numbered(prefix, *counts):
    """ "a.0", "a.1", ...; with two counts "a.0.0", "a.0.1", ..., one list of children for each."""
    if len(counts) == 1:
        return [f"{prefix}.{index}" for index in range(counts[0])]
    return [name for index, count in enumerate(counts) for name in numbered(f"{prefix}.{index}", count)]


def on_meta(make):
    with torch.device("meta"):
        return make()


class Holder(nn.Module):
    """Any tree, from keyword arguments; its forward is its own."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        raise NotImplementedError


class Block(Holder):
    def __init__(self, width=16):
        super().__init__(up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width))


class Expert(Block):
    pass


class ExpertBlock(Holder):
    def __init__(self, experts=4, width=16):
        super().__init__(
            attention=nn.Linear(width, width),
            experts=nn.ModuleList(Expert(width) for _ in range(experts)),
            norm=nn.LayerNorm(width),
        )


class Methods(nn.Module):
    """Has no forward: others call its methods or its children."""

    def __init__(self, width=16):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def blocks(count, width=16):
    return nn.ModuleList(Block(width) for _ in range(count))


def check_partition(root, units):
    """What holds for every partition of every tree."""
    assert [unit.index for unit in units] == list(range(len(units)))
    assert len(set(names(units))) == len(units)
    assert not any(unit.resident for unit in units[:-1])
    assert all(bool(unit.modules) != unit.resident for unit in units)
    assert all(unit.params for unit in units)
    modules, parameters = dict(root.named_modules()), dict(root.named_parameters())
    cut = [named for unit in units for named in unit.params]
    assert sorted(name for name, _ in cut) == sorted(parameters)
    assert all(parameters[name] is parameter for name, parameter in cut)
    order = {name: index for index, name in enumerate(parameters)}
    for unit in units:
        places = [order[name] for name, _ in unit.params]
        assert places == sorted(places)
    roots = [(name, module) for unit in units for name, module in unit.modules]
    assert all(modules[name] is module for name, module in roots)
    assert all(type(module).forward is not nn.Module.forward for _, module in roots)
    for first, second in pairwise(sorted(f"{name}." for name, _ in roots)):
        assert not second.startswith(first)
    return units


# --- hand-made trees, "auto" -----------------------------------------------------------------------------------------


def test_module_list_elements_are_units_and_the_rest_is_resident():
    model = Holder(stem=nn.Linear(2, 16), layers=blocks(4), norm=nn.LayerNorm(16))
    assert names(check_partition(model, partition(model))) == [*numbered("layers", 4), "(root)"]


def test_all_elements_of_nested_lists_are_units():
    model = Holder(stages=nn.ModuleList([nn.ModuleList([Block(), None, Block()]), blocks(2)]))
    units = check_partition(model, partition(model))
    assert names(units) == ["stages.0.0", "stages.0.2", "stages.1.0", "stages.1.1"]


def test_a_block_in_many_places_is_one_unit_with_its_first_name():
    shared = Block()
    model = Holder(layers=nn.ModuleList([shared, Block(), shared]), again=shared)
    assert names(check_partition(model, partition(model))) == ["layers.0", "layers.1"]


def test_a_tied_weight_is_owned_by_the_first_module_alone():
    embedding, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = embedding.weight
    model = Holder(embedding=embedding, layers=blocks(3), head=head)
    assert names(check_partition(model, partition(model))) == ["embedding", *numbered("layers", 3)]


def test_a_class_that_the_model_declares_is_not_split():
    model = Holder(encoder=Holder(one=Expert(), two=Holder(a=nn.Linear(16, 64), b=nn.Linear(64, 16))))
    assert names(partition(model)) == ["encoder.one.up", "encoder.one.down", "encoder.two.a", "encoder.two.b"]
    model._no_split_modules = ["Expert"]  # and is now the size that others are measured by
    assert names(partition(model)) == ["encoder.one", "encoder.two"]


def test_a_large_leaf_is_a_unit_and_a_small_one_is_resident():
    # A quarter of a block is 2304 bytes.
    model = Holder(embedding=nn.Embedding(48, 16), layers=blocks(3), position=nn.Embedding(32, 16))
    units = partition(model)
    assert [units[1].nbytes, units[0].nbytes, units[-1].nbytes] == [9216, 3072, 2048]
    assert names(units) == ["embedding", *numbered("layers", 3), "(root)"]


def test_the_resident_rest_is_at_most_one_typical_unit():
    adapters = nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in range(12))  # 2048 bytes each, a block is 9216
    model = Holder(layers=blocks(3), adapters=adapters)
    units = check_partition(model, partition(model))
    assert units[-1].resident and units[-1].nbytes == 4 * 2048
    assert root_names(units[3]) == [f"adapters.{index}" for index in range(4, 8)]


def test_a_block_without_a_forward_is_entered_by_its_children():
    model = Holder(layers=nn.ModuleList(Methods() for _ in range(2)))
    units = check_partition(model, partition(model))
    assert names(units) == ["layers.0", "layers.1", "(root)"]
    assert root_names(units[0]) == ["layers.0.up", "layers.0.down"]
    assert [name for name, _ in units[-1].params] == ["layers.0.scale", "layers.1.scale"]


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.MultiheadAttention(8, 2), nn.LSTM(4, 4)])
def test_a_root_of_one_piece_is_resident(model):
    (unit,) = check_partition(model, partition(model))
    assert (unit.name, unit.resident, unit.modules) == ("(root)", True, ())


def test_lazy_parameters_are_refused_by_name():
    with pytest.raises(PartitionError, match=r"net\.weight has no shape yet: run one batch"):
        partition(Holder(net=nn.LazyLinear(4)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_parameters_of_torchscript_are_refused_by_name():
    with pytest.raises(PartitionError, match=r"net\.weight is in a TorchScript module, .* use the Python module"):
        partition(Holder(net=torch.jit.script(nn.Linear(4, 4))))


def two_tensors(*parts, trained=False):
    weight = torch.testing._internal.two_tensor.TwoTensor(*parts)
    return Holder(net=Holder(weight=nn.Parameter(weight, requires_grad=trained)))


def test_trained_weights_of_several_tensors_are_refused_by_name():
    with pytest.raises(PartitionError, match=r"net\.weight is a TwoTensor, .* several tensors and requires grad: .*"):
        partition(two_tensors(torch.ones(4, 4), torch.ones(4, 4), trained=True))


@pytest.mark.parametrize("shares", ["the other part", "another quantised weight", "a plain weight"])
def test_parts_that_share_their_memory_are_refused_by_name(shares):
    ones = torch.ones(4, 4)
    model = two_tensors(ones, ones if shares == "the other part" else torch.ones(4, 4))
    if shares == "another quantised weight":
        model.again = two_tensors(torch.ones(4, 4), ones)
    if shares == "a plain weight":
        model.plain = Holder(weight=nn.Parameter(ones[2:], requires_grad=False))
    with pytest.raises(PartitionError, match=r"net\.weight\.\w shares its memory with .*: give each weight a copy"):
        partition(model)


def test_parts_of_a_quantised_weight_may_lie_side_by_side_in_one_storage():
    flat = torch.ones(8, 4)
    model = two_tensors(flat[:4], torch.ones(4, 4))
    model.net.weight.b = flat[4:]
    assert partition(model)


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_cannot_be_taken_apart_are_refused_by_name(fails, monkeypatch):
    kind = torch.testing._internal.two_tensor.TwoTensor
    model = two_tensors(torch.ones(4, 4), torch.ones(4, 4))
    monkeypatch.setattr(kind, "__tensor_flatten__", (lambda self: 1 / 0) if fails else lambda self: (["none"], None))
    monkeypatch.setattr(kind, "none", None, raising=False)
    message = "cannot be taken apart .* by zero" if fails else r"net\.weight\.none, of which .* is a NoneType"
    with pytest.raises(PartitionError, match=message):
        partition(model)


def test_weights_with_another_gradient_type_are_refused_by_name():
    net = Holder(net=nn.Linear(4, 4).bfloat16())
    net.net.weight.grad_dtype = None
    assert partition(net)
    net.net.weight.grad_dtype = torch.float32
    with pytest.raises(PartitionError, match=r"net\.weight has grad_dtype torch\.\w+, but is torch\.\w+: leave"):
        partition(net)


# --- cut by bytes ----------------------------------------------------------------------------------------------------


def test_an_expert_block_of_a_small_share_travels_whole():
    model = Holder(layers=nn.ModuleList(ExpertBlock(experts=3, width=64) for _ in range(9)))
    assert names(partition(model)) == numbered("layers", 9)


def test_a_block_much_larger_than_others_is_cut_into_large_parts_and_one_rest():
    parts = {"up": nn.Linear(64, 256), "norm": nn.LayerNorm(64), "down": nn.Linear(256, 64), "scale": nn.LayerNorm(64)}
    model = Holder(layers=blocks(30), large=nn.ModuleList([Holder(**parts)]))
    units = check_partition(model, partition(model))
    assert names(units) == [*numbered("layers", 30), "large.0.up", "large.0.norm", "large.0.down"]
    assert root_names(units[31]) == ["large.0.norm", "large.0.scale"]


# --- class names and callables ---------------------------------------------------------------------------------------


def test_named_classes_are_the_units_and_all_else_is_resident():
    model = Holder(embedding=nn.Embedding(500, 16), layers=blocks(3))
    units = check_partition(model, partition(model, ["Block"]))
    assert names(units) == [*numbered("layers", 3), "(root)"]
    assert [name for name, _ in units[-1].params] == ["embedding.weight"]


def test_a_named_class_may_have_the_weights_of_another_one_alone():
    model = Holder(layers=blocks(2), last=Expert())
    model.last.up, model.last.down = model.layers[0].up, model.layers[0].down
    units = check_partition(model, partition(model, ["Block", "Expert"]))
    assert names(units) == numbered("layers", 2)


def test_an_unknown_class_name_lists_existing_ones():
    model = Holder(embedding=nn.Embedding(50, 16), act=nn.ReLU(), layers=blocks(3))
    expected = (
        r"units names the class 'Blok', which is not in Holder; "
        r"its modules are: Linear \(6\), Block \(3\), Embedding \(1\), ModuleList \(1\)$"
    )
    with pytest.raises(PartitionError, match=expected):
        partition(model, ["Block", "Blok"])


def test_a_callable_chooses_the_units():
    model = Holder(layers=blocks(3), head=nn.Linear(16, 2))
    units = check_partition(model, partition(model, lambda root: root.layers[1:]))
    assert names(units) == ["layers.1", "layers.2", "(root)"]


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda root: [Block()], "inside Holder, got a Block, which is not one of them"),
        (lambda root: ["layers.0"], "inside Holder, got 'layers.0', which is not one of them"),
        (lambda root: None, "inside Holder, got None, which is not one of them"),
        (lambda root: [root], "inside Holder, got a Holder, which is not one of them"),
        (lambda root: [], "units chose 0 modules of Holder"),
        (lambda root: [root.prompts], "units chose 1 modules of Holder, none of which can be entered and owns"),
    ],
)
def test_a_callable_that_returns_anything_else_is_refused(choose, message):
    with pytest.raises(PartitionError, match=message):
        partition(Holder(layers=blocks(2), prompts=nn.ParameterList([torch.zeros(1)])), choose)


# --- transformers and torchvision, on the meta device ----------------------------------------------------------------

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 999}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 999}

TRANSFORMERS = {
    "Llama": (
        "LlamaForCausalLM", TINY | {"num_key_value_heads": 2},
        ["model.embed_tokens", *numbered("model.layers", 3), "lm_head", "(root)"],
    ),
    "T5": (
        "T5ForConditionalGeneration", T5,
        ["shared", *numbered("encoder.block", 2), *numbered("decoder.block", 2), "(root)"],
    ),
}  # fmt: skip


def transformers_model(family, class_name, settings):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**settings)
    return on_meta(lambda: getattr(transformers, class_name)(config))


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_units_of_transformers_models(family):
    class_name, settings, expected = TRANSFORMERS[family]
    model = transformers_model(family, class_name, settings)
    assert names(check_partition(model, partition(model))) == expected


# --- any tree --------------------------------------------------------------------------------------------------------

LEAVES = {
    "linear": lambda: nn.Linear(16, 16),
    "wide": lambda: nn.Linear(16, 256),
    "norm": lambda: nn.LayerNorm(16),
    "act": lambda: nn.ReLU(),
    "block": lambda: Block(),
    "attention": lambda: nn.MultiheadAttention(16, 2),
    "methods": lambda: Methods(),
    "prompts": lambda: nn.ParameterList([torch.zeros(16)]),
}
PARENTS = {
    "list": nn.ModuleList,
    "sequential": lambda children: nn.Sequential(*children),
    "dict": lambda children: nn.ModuleDict({f"key{index}": child for index, child in enumerate(children)}),
    "holder": lambda children: Holder(**{f"child{index}": child for index, child in enumerate(children)}),
}
PLANS = st.recursive(
    st.sampled_from([*LEAVES, "shared", "tied"]),
    lambda plans: st.tuples(st.sampled_from([*PARENTS]), st.lists(plans, max_size=4)),
    max_leaves=30,
)


def build(plan, shared, weight):
    if plan == "shared":
        return shared
    if plan == "tied":
        tied = nn.Linear(16, 16)
        tied.weight = weight
        return tied
    if isinstance(plan, str):
        return LEAVES[plan]()
    kind, children = plan
    return PARENTS[kind]([build(child, shared, weight) for child in children])


@given(plan=PLANS)
def test_each_parameter_of_every_tree_is_in_exactly_one_unit(plan):
    model = Holder(net=on_meta(lambda: build(plan, Block(), nn.Parameter(torch.zeros(16, 16)))))
    check_partition(model, partition(model))

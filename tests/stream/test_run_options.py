"""The options that decide what is held where: budget, automatic window, FP32 masters, fused kernels, compiled units."""

import lightning as L
import pytest
import torch
import torch._dynamo as dynamo
from often import often
from torch import nn

import models
import sp_lightning
from sp_lightning.errors import OptionError

SIMGPU = torch.device("simgpu", 0)


# ---- the same in runs


def fit(strategy, case="mlp", **trainer):
    L.seed_everything(1, verbose=False)
    module = models.ZooModule(models.case(case))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    L.Trainer(accelerator="simgpu", strategy=strategy, max_epochs=1, **quiet, **trainer).fit(
        module, models.loader(module.case, 4)
    )
    return module


def streaming(**options):
    return sp_lightning.SuperpipelineStrategy(device=SIMGPU, **options)


# ---- master_weights


def half_precision_with_fp32_masters(case, batches, dtype):
    """The same by hand: a half-precision copy computes, FP32 weights are stepped."""
    L.seed_everything(1, verbose=False)
    module = models.ZooModule(models.case(case))
    master = module.net
    half = module.case.make()
    half.load_state_dict(master.state_dict())
    half.to(SIMGPU, dtype)
    optimizer = torch.optim.AdamW(master.parameters(), 1e-2, foreach=False)
    for index in range(batches):
        with torch.no_grad():
            for low, full in zip(half.parameters(), master.parameters(), strict=True):
                low.copy_(full)
        half.zero_grad()
        batch = torch.utils._pytree.tree_map(lambda t: t.to(SIMGPU), module.case.batch(index))
        batch = torch.utils._pytree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
        module.case.loss(half, batch).backward()
        for low, full in zip(half.parameters(), master.parameters(), strict=True):
            full.grad = None if low.grad is None else low.grad.cpu().float()
        optimizer.step()
    return master


@pytest.mark.parametrize("precision, dtype", [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
@pytest.mark.parametrize("case", often(["tied_embedding", "llama", "batch_norm"]))
def test_master_weights_are_fp32_and_what_half_precision_training_with_masters_gives(case, precision, dtype):
    seen = set()

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            (optimizer,) = trainer.optimizers
            seen.update(p.dtype for p in module.parameters())
            seen.update(v.dtype for state in optimizer.state.values() for v in state.values())

    module = fit(streaming(window=2, master_weights=True), case, precision=precision, callbacks=[Looks()])
    expected = half_precision_with_fp32_masters(case, 4, dtype)
    assert seen == {torch.float32}
    for ours, theirs in zip(module.net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_master_weights_without_half_precision_are_refused():
    with pytest.raises(
        OptionError, match="precision must be 'bf16-true' or '16-true' with master_weights=True, got '32"
    ):
        fit(streaming(master_weights=True))


# ---- compile_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def losses(net, steps=3):
    optimizer, found = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(steps):
        loss = net(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(5)))


@pytest.fixture
def fresh_dynamo():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


@pytest.mark.slow
def test_units_are_compiled_once_for_their_class_without_a_break(fresh_dynamo):
    plain = stack()
    for block in plain:
        block.compile()
    expected, graphs = losses(plain), dynamo.utils.counters["stats"]["unique_graphs"]
    dynamo.reset()
    dynamo.utils.counters.clear()
    net = stack()
    with (
        dynamo.config.patch(suppress_errors=False),
        sp_lightning.stream(net, "cpu", window=2, units=["Block"], compile_units=True),
    ):
        assert losses(net) == expected
    assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not dynamo.utils.counters["graph_break"]

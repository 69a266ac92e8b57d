"""`Trainer.predict` with batches in lockstep: results, order and callbacks of one batch after the other."""

import functools
import importlib

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from refusals import refusal
from torch import nn
from torch.utils.data import DataLoader

import models
import sp_lightning
from sp_lightning.errors import ExactnessError, OptionError, UnsupportedError

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
SEEN = []  # by a hook, which changes nothing on its module
BOTH = pytest.mark.parametrize("accelerator", ["cpu", "simgpu"])


class Predicts(L.LightningModule):
    """Its steps take paths of several lengths."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = models.stack_of(models.Block)()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        SEEN.append(("transfer", dataloader_idx))
        return batch

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        for _ in range(1 + (batch_idx * 7 + dataloader_idx) % 3):
            y = self.net(batch)
        return {"y": y * batch_idx, "of": (batch_idx, dataloader_idx), "dtype": str(torch.tensor(1.0).dtype)}


class Writer(cb.BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.written = []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, number, loader):
        progress = trainer.predict_loop.batch_progress
        self.written.append((prediction["of"], indices, batch.shape, number, loader, progress.is_last_batch))
        self.written.append((progress.current.processed, progress.current.completed))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.written.append((len(predictions), indices))


def loaders(count=2):
    numbers = torch.Generator().manual_seed(1)
    sets = [torch.rand(11, 12, generator=numbers), torch.rand(5, 12, generator=numbers)]
    return [DataLoader(rows, batch_size=2) for rows in sets[:count]]


def trainer(strategy, accelerator, **options):
    if accelerator == "simgpu":
        importlib.import_module("simgpu.lightning")
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **options}
    return L.Trainer(strategy=strategy, accelerator=accelerator, devices=1, **options)


def streaming(at_once, **options):
    return sp_lightning.SuperpipelineStrategy(window=1, predict_at_once=at_once, **options)


def predicted(strategy, accelerator, make=Predicts, data=loaders, **options):
    module, writer = make(), Writer()
    SEEN.clear()
    run = trainer(strategy, accelerator, callbacks=[writer], **options)
    return run.predict(module, data()), writer.written, SEEN[:]


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)
    return found == expected


@BOTH
@pytest.mark.parametrize("at_once", [1, 3, 100, "auto"])
@pytest.mark.few(1)
def test_results_and_callbacks_are_those_of_a_run_without_it(at_once, accelerator):
    expected, written, before = predicted("superpipeline", accelerator)
    found, also_written, after = predicted(streaming(at_once), accelerator)
    assert same(found, expected) and also_written == written and after == before
    assert len(expected[0]) == 6 and len(expected[1]) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-true"},
        {"precision": "bf16-mixed"},
        {"inference_mode": False},
        {"limit_predict_batches": 2},
        {"fast_dev_run": 4},
        {"limit_predict_batches": 0},
    ],
    ids=str,
)
@pytest.mark.few(1)
def test_every_setting_of_the_trainer_has_its_results(options):
    expected = predicted("superpipeline", "simgpu", **options)
    found = predicted(streaming(4), "simgpu", **options)
    assert same(found[0], expected[0]) and found[1] == expected[1]


def test_batches_at_once_share_the_trips_of_the_weights():
    class Once(Predicts):
        def predict_step(self, batch, batch_idx):
            return self.net(batch)

    def fetched(at_once):
        run = trainer(streaming(at_once), "simgpu")
        run.predict(Once(), loaders(1))
        return run.strategy.handle.stats()["fetches"]

    alone, together = fetched(None), fetched(5)
    assert alone > 4  # six passes
    assert together == pytest.approx(alone / 3, abs=1)  # two: the first batch shows that steps change nothing


class Centres(Predicts):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.mean = batch.mean()
        return batch - self.mean

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"y": self.net(batch) + self.mean, "of": batch_idx}


class Scales(Predicts):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.zeros(()))

    def on_predict_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.scale.fill_(1.0 + batch_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"y": self.net(batch) * self.scale, "of": batch_idx}


class Remembers(Predicts):
    memory = 0.0

    def on_predict_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.memory = outputs["y"].mean()

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"y": self.net(batch + self.memory), "of": batch_idx}


class IsTold(Predicts):
    """Its Trainer's callback tells it how many batches came."""

    came = 0

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"y": self.net(batch) * self.came, "of": batch_idx}


class Tells(cb.Callback):
    def on_predict_batch_start(self, trainer, module, *_):
        module.came += 1


@BOTH
@pytest.mark.parametrize("make", [Centres, Scales, Remembers, IsTold])
@pytest.mark.parametrize("at_once", [4, "auto"])
@pytest.mark.few(3)
def test_batches_whose_hooks_change_the_module_run_one_after_the_other(make, at_once, accelerator):
    def run(at_once):
        run = trainer(streaming(at_once), accelerator, callbacks=[Tells()] if make is IsTold else [])
        return run.predict(make(), loaders())

    assert same(run(at_once), run(None))


def test_a_module_with_a_hook_that_changes_nothing_runs_alone_for_one_batch():
    class Ends(Predicts):
        def predict_step(self, batch, batch_idx):
            return self.net(batch)

        def on_predict_batch_end(self, *_):
            SEEN.append("end")

    def fetched(at_once):
        run = trainer(streaming(at_once), "simgpu")
        run.predict(Ends(), loaders(1))
        return run.strategy.handle.stats()["fetches"]

    alone, together = fetched(None), fetched(5)
    assert 3 * (together - 1) == alone - 1  # one pass of the first batch, one of the others; one unit stays there


class Draws(Predicts):
    def predict_step(self, batch, batch_idx):
        return self.net(batch + torch.rand_like(batch)) + float(torch.rand(()))


def test_what_steps_draw_does_not_depend_on_how_many_are_under_way():
    def drawn(at_once):
        L.seed_everything(3)
        found = trainer(streaming(at_once), "simgpu").predict(Draws(), loaders(1))
        return [*found, torch.rand(3)]

    first = drawn(1)
    assert same(drawn(2), first) and same(drawn(5), first)
    assert not torch.equal(first[0], first[1])


class Failure(Exception):
    pass


class Fails(Predicts):
    def predict_step(self, batch, batch_idx):
        y = self.net(batch)
        if batch_idx == 2:
            raise Failure
        return {"y": y, "of": batch_idx}


@BOTH
def test_a_step_that_raises_ends_the_run_after_the_batches_before_it(accelerator):
    module, writer = Fails(), Writer()
    run = trainer(streaming(3), accelerator, callbacks=[writer])
    with pytest.raises(Failure):
        run.predict(module, loaders(1))
    assert [of for of, *rest in writer.written if rest[1:]] == [0, 1]
    assert not vars(run.predict_loop).keys() & {"_predict_step", "on_run_end"}
    with pytest.raises(Failure):
        trainer(streaming(None), accelerator).predict(module, loaders(1))
    assert all(p.device.type == "cpu" and type(p) is nn.Parameter for p in module.parameters())


def test_an_interrupt_ends_the_run():
    class Interrupts(cb.Callback):
        def on_predict_batch_end(self, *_):
            raise KeyboardInterrupt

    module = Predicts()
    run = trainer(streaming(3), "simgpu", callbacks=[Interrupts()])
    with pytest.raises(SystemExit):
        run.predict(module, loaders(1))
    assert all(type(p) is nn.Parameter for p in module.parameters())


def test_the_same_trainer_runs_without_it_afterwards_and_fits():
    class Fits(Predicts):
        def training_step(self, batch, _):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module, run = Fits(), trainer(streaming(3), "cpu", max_epochs=1)
    first = run.predict(module, loaders(1))
    run.fit(module, loaders(1)[0])
    assert len(run.predict(module, loaders(1))) == len(first)


def test_a_progress_bar_counts_batches(capsys):
    run = trainer(streaming(3), "cpu", enable_progress_bar=True, callbacks=[cb.TQDMProgressBar()])
    run.predict(Predicts(), loaders(1))
    assert "6/6" in capsys.readouterr().out


def test_it_works_with_pytorch_lightning():
    pl = pytest.importorskip("pytorch_lightning")
    import sp_lightning.pytorch_lightning as ours

    class OfPL(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = models.stack_of(models.Block)()

        def predict_step(self, batch, batch_idx):
            return self.net(batch)

    def run(at_once):
        strategy = ours.SuperpipelineStrategy(window=1, predict_at_once=at_once)
        return pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False).predict(OfPL(), loaders(1))

    assert same(run(4), run(None))


# --- Refused


def refused(match, module=None, callbacks=(), change=lambda run: None, error=UnsupportedError):
    run = trainer(streaming(3), "cpu", callbacks=list(callbacks))
    change(run)
    module = module or Predicts()
    with pytest.raises(error, match=match):
        run.predict(module, loaders(1))
    assert all(type(p) is nn.Parameter for p in module.parameters())


def test_hooks_that_are_a_pair_are_refused():
    class Times(cb.Callback):
        def on_predict_batch_start(self, *_):
            pass

        def on_predict_batch_end(self, *_):
            pass

    class Pair(Predicts):
        on_predict_batch_start = on_predict_batch_end = lambda self, *_: None

    refused("Times has both on_predict_batch_start and on_predict_batch_end", callbacks=[Times()])
    refused("Pair has both", Pair())


@refusal(
    "a hook of a Trainer's that changes what the module keeps while steps of other batches are under way "
    "(`predict_at_once=`), where none did so before the first step, or the module's own after it",
    ExactnessError,
    "`predict_at_once=1`",
)
def test_a_hook_that_changes_the_module_while_steps_are_under_way_is_an_error():
    class Later(cb.Callback):
        def on_predict_batch_start(self, trainer, module, batch, number, *_):
            if number == 1:
                module.number = number

    class Ends(cb.Callback):
        def on_predict_batch_end(self, trainer, module, outputs, batch, number, *_):
            module.number = number

    for callback in (Later(), Ends()):
        refused("Predicts.number was changed by a hook", callbacks=[callback], error=ExactnessError)


def test_a_hook_that_calls_the_module_is_refused():
    class Calls(cb.Callback):
        def on_predict_batch_end(self, trainer, module, outputs, batch, *_):
            module.net(batch)

    refused("was entered between calls in lockstep", callbacks=[Calls()])


def test_a_loop_or_a_step_that_draws_batches_itself_is_refused():
    class Draws(Predicts):
        def predict_step(self, dataloader_iter):
            return next(dataloader_iter)

    class Loop(type(L.Trainer(logger=False).predict_loop)):
        pass

    def give(run):
        run.predict_loop = Loop(run)

    refused(r"found predict_step\(dataloader_iter\)", Draws())
    refused("found Loop", change=give)


@pytest.mark.parametrize("value", [0, 1.5, True, "all"])
def test_other_numbers_are_refused(value):
    with pytest.raises(OptionError, match="predict_at_once must be 'auto' or an int >= 1"):
        streaming(value)


def test_fabric_has_lockstep_in_place_of_the_option():
    with pytest.raises(OptionError, match="predict_at_once"):
        sp_lightning.SuperpipelineFabricStrategy(predict_at_once=2)
    fabric = L.Fabric(strategy=sp_lightning.SuperpipelineFabricStrategy(window=1), accelerator="cpu", devices=1)
    net = fabric.setup(models.stack_of(models.Block)())
    x = torch.rand(2, 12)
    with torch.no_grad():
        expected = [net(x * number) for number in range(4)]
        calls = [functools.partial(net, x * number) for number in range(4)]
        assert same(sp_lightning.lockstep(net, calls, at_once=3), expected)
    fabric.strategy.teardown()


class Sized(L.LightningModule):
    """Has no room for batches of four rows, of which the second step says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.batch_size = models.stack_of(models.Block)(), 1

    def predict_step(self, batch, batch_idx):
        if len(batch) == 4 and batch_idx == 1:
            raise RuntimeError("CUDA out of memory.")
        return self.net(batch)

    def on_predict_batch_end(self, outputs, batch, batch_idx):
        SEEN.append((batch_idx, batch.shape, outputs.clone().cpu()))

    def predict_dataloader(self):
        return DataLoader(torch.rand(16, 12, generator=torch.Generator().manual_seed(1)), batch_size=self.batch_size)


class Fetches(L.Callback):
    def on_predict_epoch_start(self, trainer, module):
        self.before = trainer.strategy.handle.stats()["fetches"]

    def on_predict_epoch_end(self, trainer, module):
        self.count = trainer.strategy.handle.stats()["fetches"] - self.before


@BOTH
@pytest.mark.parametrize("first", [1, 4])
def test_runs_that_try_batch_sizes_have_batches_at_once_and_leave_none_to_the_next_run(first, accelerator):
    def run(at_once):
        SEEN.clear()
        module, fetches = Sized(), Fetches()
        finder = cb.BatchSizeFinder(init_val=first, steps_per_trial=3)
        found = trainer(streaming(at_once), accelerator, callbacks=[finder, fetches]).predict(module)
        return module.batch_size, found, SEEN[:], fetches.count

    size, expected, seen, one_by_one = run(1)
    found, also_expected, also_seen, at_once = run(3)
    assert found == size == 2 and same(also_expected, expected) and same(also_seen, seen)
    assert at_once < one_by_one / 2

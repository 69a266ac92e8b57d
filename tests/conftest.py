"""What holds for every test: one thread, its own directory, and a simulated accelerator that starts clean and ends
without a race. In the default run nothing is taken from, or left in, the repository."""

import functools
import gc
import importlib.abc
import logging
import os
import signal
import sys
import tempfile
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read with torch; else threads spin while they wait, as others run

import hypothesis
import hypothesis.configuration
import nullcuda
import pytest
import torch
from often import is_in_shard

gc.disable()  # until all is imported and collected: nothing of it is garbage
torch.set_num_threads(1)  # decides a sum's last bit, and holds only from before the first use
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs inherit it; tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

CACHES = {".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"}  # of tools that may run beside the suite

hypothesis.configuration.set_hypothesis_home_dir(os.path.join(tempfile.gettempdir(), "hypothesis"))
hypothesis.settings.register_profile("suite", database=None, deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("suite")


class Unavailable(importlib.abc.MetaPathFinder):
    """A device that can not be simulated: the test that imports simgpu is skipped with the reason, or fails.

    Only a missing tool skips, and only outside CI: sources that do not compile are a failure everywhere.
    """

    def __init__(self, error: Exception) -> None:
        self.reason = str(error)
        self.skips = isinstance(error, ImportError) and os.environ.get("CI") != "true"

    def find_spec(self, name, path=None, target=None):
        if name == "simgpu":
            self.stop()

    def stop(self):
        if self.skips:
            pytest.skip(self.reason, allow_module_level=True)
        pytest.fail(self.reason, pytrace=False)


simgpu = unavailable = None
try:
    import simgpu  # before any backward pass: the autograd engine makes its device threads once
except (ImportError, RuntimeError) as error:
    unavailable = Unavailable(error)
    sys.meta_path.insert(0, unavailable)


def pytest_report_header():
    """One line where the device is missing: what needs none runs."""
    if unavailable:
        return f"no simulated device ({unavailable.reason}): its tests {'are skipped' if unavailable.skips else 'fail'}"


def collect():
    """Frees garbage, and leaves what lives out of the next collections: else each would go through all imports."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="2/3", help="only the second of three shares of the tests, by their names")


def pytest_collection_modifyitems(config, items):
    if shard := config.getoption("shard"):
        others = [item for item in items if not is_in_shard(item.nodeid, shard)]
        items[:] = [item for item in items if is_in_shard(item.nodeid, shard)]
        config.hook.pytest_deselected(items=others)


def pytest_runtest_logfinish():
    """A test that failed, as expected or not, holds nothing on the device any more: the next one would be blamed."""
    for name in ("last_exc", "last_traceback", "last_value"):  # pytest leaves them to debuggers
        vars(sys).pop(name, None)


def pytest_runtestloop():
    gc.enable()
    collect()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(pytestconfig):
    """The suite leaves no file in the repository's root."""
    before = set(os.listdir(pytestconfig.rootpath))
    yield
    new = set(os.listdir(pytestconfig.rootpath)) - before - CACHES
    assert not new, f"a test left {sorted(new)} in {pytestconfig.rootpath}"


@pytest.fixture(scope="session")
def null_cuda():
    """Makes the environment of processes that have torch's CUDA without a device: `nullcuda.environment`."""
    try:
        nullcuda.environment()
    except ImportError as error:
        Unavailable(error).stop()
    return nullcuda.environment


@pytest.fixture
def arithmetic():
    """The simulated device rounds as CUDA does, and what was found out about another rounding is forgotten."""
    from sp_lightning.optim import compiled

    def forget():
        compiled._is_same.cache_clear()
        compiled.alike.clear()

    forget()
    with simgpu.cuda_arithmetic():
        yield
        torch.accelerator.synchronize()
    forget()


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Relative paths, Trainer's ``default_root_dir`` among them, lead into the test's own directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def own_environment():
    """What a test, or a program that it imports, sets in the environment is gone afterwards."""
    before = dict(os.environ)
    yield
    if (after := dict(os.environ)) != before:
        for name in after.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@pytest.fixture(autouse=True)
def own_log():
    """What `lightning` logs goes to its own logger: importing `pytorch_lightning` turned it to that package's."""
    if (rank_zero := sys.modules.get("lightning.pytorch.utilities.rank_zero")) is not None:
        sys.modules["lightning_utilities.core.rank_zero"].log = logging.getLogger(rank_zero.__name__)


@pytest.fixture(autouse=True)
def nothing_streams_on():
    """Whoever streams a module closes it: what is left would be seen by the tests that follow."""
    yield
    if "sp_lightning" in sys.modules:  # else nothing can stream, and importing it takes seconds
        from sp_lightning.handles import open_handles
        from sp_lightning.stream.parameters import wholes

        assert not [handle for handle in open_handles if not handle.closed], "a module still streams"
        assert not wholes, f"{len(wholes)} quantised weights are still streamed"


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("simgpu", marks=pytest.mark.simgpu)])
def device(request):
    """A test that asks for it runs on the simulated accelerator, and in the slow run on the CPU."""
    if unavailable and request.param == "simgpu":
        unavailable.stop()
    return torch.device("cpu") if request.param == "cpu" else torch.device("simgpu", 0)


left = {"by": "", "nbytes": 0}  # the test before this one; what was left on the device, and was said to be


def nothing_is_left_on_the_device(test):
    """By the one before: what a test has there may be let go only after its last fixture ended."""
    patience = time.monotonic() + 5  # autograd's own thread lets go of the last graph when it comes to it
    while (nbytes := torch.accelerator.memory_allocated()) > left["nbytes"] and time.monotonic() < patience:
        time.sleep(0.01)
        gc.unfreeze()
        empty_caches_of_transformers()
        collect()
    before, left["nbytes"] = left["nbytes"], nbytes
    by, left["by"] = left["by"], test
    assert nbytes <= before, f"{by} left {nbytes - before} bytes on the device for good"


def empty_caches_of_transformers():
    """Some of its models remember tensors by the tensors they were made from."""
    for cache in gc.get_objects():
        if isinstance(cache, functools._lru_cache_wrapper) and cache.__module__.startswith("transformers."):
            cache.cache_clear()


@pytest.fixture(autouse=True)
def clean_simgpu(request):
    """Each test starts with an idle device and clean counters, and fails at its end if the checker saw a race.

    A test that provokes races takes them, and asserts on them, with ``simgpu.races()``: what was taken is not held
    against it.
    """
    if unavailable and request.node.get_closest_marker("simgpu"):
        unavailable.stop()
    if simgpu is None:
        yield
        return
    collect()  # an earlier test's garbage would be freed, and counted, during this one
    simgpu.reset()
    nothing_is_left_on_the_device(request.node.nodeid)
    yield
    try:
        torch.accelerator.synchronize()  # whose error is this test's
        races = simgpu.races()
    finally:
        simgpu.reset()
    assert not races, "\n".join(races)

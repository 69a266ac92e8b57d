"""The wheel where no compiler is: it trains, and finds the compiled step that it carries."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from sp_lightning.kernels import build, loader

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = """
import hashlib, importlib.util, logging, sys
logging.basicConfig(stream=sys.stderr, level="INFO")
import torch, sp_lightning
from sp_lightning.optim import compiled

assert not [name for name in ("transformers", "pytest", "matplotlib") if importlib.util.find_spec(name)]
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(4)])
x = torch.randn(8, 600)
with sp_lightning.stream(model, "cpu", window=1, units="Linear") as handle:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.finish_step()
print(compiled.why_none() or compiled.variant_in_use())
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
print(sp_lightning.__file__)
"""


def make_wheel(folder, **env):
    """Build the wheel; return its path and what the build said."""
    command = [sys.executable, "-m", "pip", "-v", "wheel", "--no-deps", "--wheel-dir", folder, ROOT]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


def required(name, found):
    """Collect a distribution and those that it requires without any extra."""
    if name not in found:
        found[name] = importlib.metadata.distribution(name)
        for requirement in map(Requirement, found[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required(requirement.name, found)


def bare_environment(folder, wheel):
    """Make a virtual environment of the wheel and what it requires, which is linked; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], check=True, capture_output=True)
    found = {}
    for name in ("torch", "lightning", "psutil"):
        required(name, found)
    for distribution in found.values():
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The wheel, as this machine builds it, in an environment of its own."""
    folder = tmp_path_factory.mktemp("bare")
    wheel, _ = make_wheel(folder)
    return wheel, bare_environment(folder / "venv", wheel)


def run(python, folder, *arguments, **env):
    """Run a program where no compiler is found; return what it wrote."""
    env = {"PATH": str(python.parent), "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), **env}
    env["OMP_WAIT_POLICY"] = "passive"  # else a busy machine's cores are lost to threads that wait
    done = subprocess.run([python, *arguments], env=env, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done


def test_the_wheel_names_its_platform_and_has_every_variant(bare):
    wheel, python = bare
    assert wheel.name.endswith(f"-py3-none-{build.platform_tag([])}.whl")
    (folder,) = python.parents[1].glob("lib/python*/site-packages/sp_lightning/kernels")
    assert {path.name for path in folder.glob("*.so")} == {build.file_name(name) for name in build.variants()}


def test_the_wheel_trains_with_each_variant_it_carries(bare, tmp_path):
    """The second is that of a processor without AVX-512; the last is without the library."""
    _, python = bare
    runs = [name for name, needed in build.variants().items() if loader._instructions().issuperset(needed)]
    hashes = set()
    for asked, expected in [("", runs[0]), *((name, name) for name in runs), ("none", f"{loader.SWITCH} is 'none'")]:
        done = run(python, tmp_path, "-c", TRAIN, **{loader.SWITCH: asked})
        variant, weights, file = done.stdout.splitlines()
        assert variant == expected and file.startswith(str(python.parents[1])), done.stderr
        hashes.add(weights)
    assert len(hashes) == 1
    assert not (tmp_path / "cache").exists()  # nothing was compiled


def test_the_quickstart_runs_in_the_bare_environment(bare, tmp_path):
    _, python = bare
    assert "equal to the last digit" in run(python, tmp_path, ROOT / "examples" / "quickstart.py").stdout


def test_a_wheel_built_without_a_compiler_says_so_and_trains(tmp_path):
    wheel, said = make_wheel(tmp_path, CXX="/no/such/compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "the wheel has no compiled optimizer step: no C++ compiler ('/no/such/compiler'" in said
    done = run(bare_environment(tmp_path / "venv", wheel), tmp_path, "-c", TRAIN)
    assert done.stdout.startswith("no C++ compiler ('c++', from $CXX, else c++) is on this machine")

"""The wheel, installed where there is no repository and nothing but the declared dependencies, does what shoal does.

No network is needed: the environment is a new one, in which a link stands for each distribution that the wheel's
metadata requires, directly or by way of others. An import of anything else fails there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # one after the other, less than a minute in all

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_INSTALLED = ("tensorboard", "transformers", "torchao", "tokenizers", "safetensors", "datasets", "hypothesis", "PIL")
TINY = (
    "--model.num_layers 1 --model.hidden 32 --model.ffn 48 --data.seq_len 32 --data.global_batch 4"
    " --data.validation 0.0005 --device cpu --launch.threads 1"
)

IMPORT_ALL = """
import importlib, importlib.util, json, pkgutil, sys
import shoal

for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
    if not module.name.endswith("__main__") and ".kernels." not in module.name:  # kernels need triton
        importlib.import_module(module.name)
found = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
print(json.dumps({"file": shoal.__file__, "version": shoal.__version__, "found": found}))
"""


@dataclass(frozen=True)
class Build:
    direct: Path
    """The wheel that was built from the tree."""
    wheel: Path
    """The wheel that was built from the sdist."""
    sdist: Path


@dataclass(frozen=True)
class Installed:
    folder: Path
    """Empty, and outside of the repository."""
    bin: Path

    def run(self, command: str, *words: str) -> str:
        """Run a program of the environment; return its stdout."""
        name, *rest = command.split()
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        done = subprocess.run(
            [self.bin / name, *rest, *words],
            cwd=self.folder,
            env={**kept, "HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Build from a copy: setuptools would write into the tree, and pack what an earlier build left there."""
    folder = tmp_path_factory.mktemp("built")
    tree, dist = folder / "tree", folder / "dist"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "build", "--no-isolation"]
    for words in (["--wheel", "--outdir", folder / "direct"], ["--outdir", dist]):  # the second: sdist, and wheel of it
        done = subprocess.run([*build, *words, tree], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    ((direct,), (wheel,), (sdist,)) = ((folder / "direct").iterdir(), dist.glob("*.whl"), dist.glob("*.tar.gz"))
    return Build(direct, wheel, sdist)


@pytest.fixture(scope="module")
def installed(built: Build, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    for found in required(metadata_of(built.wheel)):
        link(found, site)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python")]
    for words in (["install", "--quiet", "--no-index", str(built.wheel)], ["check"]):
        subprocess.run([*pip, *words], check=True, stdout=subprocess.DEVNULL)
    return Installed(tmp_path_factory.mktemp("elsewhere"), home / "bin")


def metadata_of(wheel: Path) -> list[str]:
    """The lines of the wheel's metadata that say what it requires."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return re.findall(r"^Requires-Dist: (.*)$", archive.read(name).decode(), re.MULTILINE)


def required(lines: list[str]) -> list[Distribution]:
    """What has to be installed for these requirements without an extra, and for theirs."""
    found: dict[str, Distribution] = {}
    ahead = [(line, "") for line in lines]  # and the extra that it is required for
    seen = set()
    while ahead:
        line, extra = ahead.pop()
        needed = Requirement(line)
        if (line, extra) in seen or (needed.marker and not needed.marker.evaluate({"extra": extra})):
            continue
        seen.add((line, extra))
        one = found.setdefault(canonicalize_name(needed.name), distribution(needed.name))
        ahead += [(other, extra) for other in one.requires or () for extra in (*needed.extras, "")]
    return list(found.values())


def link(found: Distribution, site: Path) -> None:
    """Make the packages, modules and metadata of a distribution importable."""
    names = {PurePosixPath(str(file)).parts[0] for file in found.files or ()}
    for name in names - {"..", "__pycache__", "/"}:
        if not (site / name).exists():  # `nvidia` is of many distributions
            (site / name).symlink_to(Path(str(found.locate_file(name))))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


# ── what is built ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_wheel_has_every_file_of_the_package(built: Build) -> None:
    """Also `py.typed` and the tables that are no Python; and nothing else, such as tests."""
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in (source / "shoal").rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    names = names_in(built.direct)
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"shoal/py.typed", "shoal/planner/backtest/paper_figures.csv"} <= names


def test_the_sdist_builds_the_same_wheel(built: Build) -> None:
    assert built.wheel.name == built.direct.name
    assert names_in(built.wheel) == names_in(built.direct)
    assert built.sdist.name == built.wheel.name.split("-py3")[0] + ".tar.gz"


def test_the_metadata_says_what_pyproject_says(built: Build) -> None:
    lines = metadata_of(built.wheel)
    assert [line for line in lines if "extra ==" not in line] == PROJECT["dependencies"]
    extras = {extra for line in lines for extra in re.findall(r'extra == "(.*)"', line)}
    assert extras == set(PROJECT["optional-dependencies"])


# ── what is installed ────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_module_imports_with_the_declared_dependencies_alone(installed: Installed) -> None:
    said = json.loads(installed.run("python -I -W error -c", IMPORT_ALL, *NOT_INSTALLED))
    assert Path(said["file"]).is_relative_to(installed.bin.parent)
    assert said["found"] == []
    assert installed.run("shoal --version").split() == ["shoal", said["version"]]


def test_help(installed: Installed) -> None:
    assert installed.run("shoal --help").startswith("usage: shoal ")


def test_explain(installed: Installed) -> None:
    assert installed.run("shoal explain P011").startswith("P011: ")


def test_plan(installed: Installed) -> None:
    said = installed.run("shoal plan llama3-8b --cluster h200:8 --seq-len 8192 --global-batch 64")
    assert "shoal train --model.name llama --model.preset llama3-8b " in said
    assert "--plan 'dp_shard=8 zero=2 mb=2 bf16'" in said


def test_verify(installed: Installed) -> None:
    said = installed.run(
        "shoal verify --json --steps 1 --nproc 2 --device cpu --launch.threads 1 --plan", "zero=1 mb=1"
    )
    assert json.loads(said)["equal"] is True


def test_train_without_a_recipe(installed: Installed) -> None:
    """On the default corpus, which is the source of Python's own library."""
    said = json.loads(installed.run(f"shoal train --json --nproc 1 --run.duration 2step {TINY}"))
    assert said["steps"] == 2
    assert (installed.folder / said["run_directory"] / "summary.json").exists()

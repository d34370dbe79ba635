"""Beside DeepSpeed itself (`make test-deepspeed`): equal losses, its checkpoints read, ours loaded by it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.formats.export import ExportSettings, export
from shoal.checkpoint.formats.import_ import ImportSettings, import_checkpoint, read
from shoal.checkpoint.full_tensor import FullTensors
from shoal.checkpoint.storage.locate import find
from shoal.config.deepspeed.translate import translate
from shoal.config.deepspeed.translation import Target
from shoal.deepspeed import members
from shoal.deepspeed.engine import Engine

ROOT = Path(__file__).parents[2]
SITE = os.environ.get("SHOAL_DEEPSPEED", "")
pytestmark = [
    pytest.mark.skipif(not SITE, reason="needs DeepSpeed: make test-deepspeed"),
    pytest.mark.timeout(1800),
]


def load(name: str) -> Any:
    """A script of benchmarks/deepspeed."""
    folder = ROOT / "benchmarks" / "deepspeed"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(f"deepspeed_{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))


def test_losses_are_those_of_deepspeed() -> None:
    run = load("run")
    found = run.losses(Path(SITE))
    differences = run.differences(found)
    assert len(differences) >= 20
    for name, difference in differences.items():
        assert difference < run.LIMIT, name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    run = load("run")
    run.on_two_ranks(Path(SITE), "deepspeed", "save.py", str(folder))
    return folder


NAMES = [f"zero{stage}-{precision}" for stage in (1, 2, 3) for precision in ("fp32", "bf16")]


@pytest.mark.parametrize("name", NAMES)
def test_its_checkpoints_are_read(saved: Path, tmp_path: Path, name: str) -> None:
    check_import(saved / name, saved / name / "whole.pt", tmp_path)


@pytest.mark.parametrize("name", ["zero1-fp32", "zero3-fp32"])
def test_its_universal_checkpoints_are_read(saved: Path, tmp_path: Path, name: str) -> None:
    words = ["--input_folder", str(saved / name / "global_step3"), "--output_folder", str(tmp_path / "universal")]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words, *workers],
        env=load("run").environment(Path(SITE), "deepspeed"),
        check=True,
        capture_output=True,
    )
    check_import(tmp_path / "universal", saved / name / "whole.pt", tmp_path)


def check_import(source: Path, whole: Path, tmp_path: Path) -> None:
    how = ImportSettings(step=3)
    found = read(source, how)
    import_checkpoint(found, tmp_path / "ours", how, lambda size: None)
    step = find(tmp_path / "ours")
    expected = torch.load(whole, weights_only=True)
    with FullTensors(step) as full:
        for name, tensor in expected.items():
            if name.endswith("frozen.weight") and "model/frozen.weight" not in step.manifest.tensors:
                pytest.fail("the frozen weight is missing")
            if name.startswith("optimizer/step/"):
                parameter = name.removeprefix("optimizer/step/")
                assert step.manifest.state["scalars"][parameter]["step"] == float(tensor)
                continue
            ours = torch.cat([box.read() for box in full.tensor(name).boxes])
            torch.testing.assert_close(
                ours, tensor.float(), rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert "model/scale" in step.manifest.tensors
        assert "model/tied.weight" not in step.manifest.tensors


def test_it_loads_what_is_exported(saved: Path, tmp_path: Path) -> None:
    how = ImportSettings(step=3)
    import_checkpoint(read(saved / "zero2-fp32", how), tmp_path / "ours", how, lambda size: None)
    settings = ExportSettings(format="deepspeed")
    export(find(tmp_path / "ours"), tmp_path / "theirs", settings, lambda size: None)
    run = load("run")
    whole = str(saved / "zero2-fp32" / "whole.pt")
    run.on_two_ranks(Path(SITE), "deepspeed", "load.py", str(tmp_path / "theirs"), whole)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What shoal's engine has saved on two ranks, with several groups of parameters and with one."""
    folder = tmp_path_factory.mktemp("trained")
    load("run").on_two_ranks(Path(SITE), "shoal", "train.py", str(folder))
    return folder


@pytest.mark.parametrize(("groups", "stages"), [("groups", ["1", "2"]), ("one", ["1", "3"])])
def test_it_resumes_what_shoal_has_trained(trained: Path, tmp_path: Path, groups: str, stages: list[str]) -> None:
    """Weights, moments, steps and learning rate: the step after them is that of plain torch."""
    settings = ExportSettings(format="deepspeed", optimizer=True)
    export(find(trained / groups), tmp_path / "theirs", settings, lambda size: None)
    folder = str(tmp_path / "theirs")
    load("run").on_two_ranks(Path(SITE), "deepspeed", "load_universal.py", folder, groups, *stages)


def engine_of_deepspeed() -> tuple[dict[str, list[str]], set[str]]:
    """Its public methods with the names of their arguments, and all attributes that its source sets or defines."""
    tree = ast.parse((Path(SITE) / "deepspeed" / "runtime" / "engine.py").read_text())
    [engine] = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "DeepSpeedEngine"]
    methods = {
        one.name: [each.arg for each in one.args.args[1:]] for one in engine.body if isinstance(one, ast.FunctionDef)
    }
    set_there = {
        one.attr
        for one in ast.walk(engine)
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self"
    }
    public = {name: arguments for name, arguments in methods.items() if not name.startswith("_")}
    return public, set_there | methods.keys()


def test_methods_take_the_arguments_of_deepspeed() -> None:
    methods, names = engine_of_deepspeed()
    assert sorted(members.OF_ENGINE.keys() - names) == []
    shared = {name: arguments for name, arguments in methods.items() if hasattr(Engine, name)}
    assert len(shared) > 40
    for name, arguments in shared.items():
        own = inspect.signature(getattr(Engine, name)).parameters if callable(getattr(Engine, name)) else {}
        takes_any = any(one.kind is one.VAR_KEYWORD for one in own.values())
        assert takes_any or not set(arguments) - own.keys(), name
        places = [one.name for one in own.values() if one.kind is one.POSITIONAL_OR_KEYWORD and one.name != "self"]
        assert arguments[: len(places)] == places[: len(arguments)], name


def keys_of(path: str, name: str) -> list[str]:
    """The keys of a section, as the class of DeepSpeed has them."""
    tree = ast.parse((Path(SITE) / "deepspeed" / "runtime" / path).read_text())
    [section] = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    found = []
    for field in section.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            words = field.value.keywords if isinstance(field.value, ast.Call) else []
            alias = [one.value.value for one in words if one.arg == "alias" and isinstance(one.value, ast.Constant)]
            found.append(str((alias or [field.target.id])[0]))
    return found


@pytest.mark.parametrize("target", ["train", "plan", "initialize"])
def test_every_key_of_deepspeed_is_known(target: Target) -> None:
    """A key that is rejected as none of DeepSpeed's would be a wrong answer."""
    offload = {
        "offload_optimizer": "DeepSpeedZeroOffloadOptimizerConfig",
        "offload_param": "DeepSpeedZeroOffloadParamConfig",
    }
    zero: dict[str, Any] = dict.fromkeys(keys_of("zero/config.py", "DeepSpeedZeroConfig"))
    zero |= {key: dict.fromkeys(keys_of("zero/offload_config.py", name)) for key, name in offload.items()}
    config = {
        "zero_optimization": zero,
        "bf16": dict.fromkeys(keys_of("precision_config.py", "DeepSpeedBF16Config")),
        "fp16": dict.fromkeys(keys_of("precision_config.py", "DeepSpeedFP16Config")),
        "train_batch_size": 8,
    }
    tree = ast.parse((Path(SITE) / "deepspeed" / "runtime" / "config.py").read_text())
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and ast.unparse(one.func) == "get_scalar_param"]
    names = {ast.unparse(one.args[1]) for one in calls if ast.unparse(one.args[0]) == "param_dict"}
    constants = (Path(SITE) / "deepspeed" / "runtime" / "constants.py").read_text()
    known = dict(re.findall(r'^([A-Z0-9_]+) = "([a-z0-9_]+)"', constants, re.MULTILINE))
    config = dict.fromkeys(known[name] for name in names if name in known) | config
    assert len(zero) > 30
    assert len(config) > 15
    assert [one.what for one in translate(config, target=target, num_ranks=8).problems if one.code == "E004"] == []


def test_the_script_of_the_page_runs_with_both(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    [script] = [
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import shoal.deepspeed as" in text
    ]
    printed = {}
    for engine, line in (("shoal", "import shoal.deepspeed as deepspeed"), ("deepspeed", "import deepspeed")):
        path = tmp_path / engine / "script.py"
        path.parent.mkdir()
        path.write_text(script.replace("import shoal.deepspeed as deepspeed", line))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
        env = load("run").environment(Path(SITE), engine)
        done = subprocess.run(command, env=env, cwd=path.parent, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        printed[engine] = [json.loads(line) for line in re.findall(r"^losses (.*)$", done.stdout, re.MULTILINE)]
    assert printed["shoal"]
    assert printed["shoal"][0] == pytest.approx(printed["deepspeed"][0], abs=1e-5)

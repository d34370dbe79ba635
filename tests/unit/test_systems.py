"""What the benchmark of one GPU asks of systems, they are asked: options that one would not hear of are refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "h200" / "systems.py"


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("systems", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "systems", module)  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("system", "words", "is_heard"),
    [
        ("accelerate", ["--precision", "fp8"], False),
        ("accelerate", ["--states", "bf16"], False),
        ("torchtitan", ["--recompute", "full"], False),
        ("torchtitan", ["--eager"], False),
        ("torchtitan", ["--precision", "fp8", "--states", "bf16", "--steps", "3"], True),
        ("shoal", ["--recompute", "full", "--clip", "1", "--states-first"], True),
        ("accelerate", ["--plugin"], True),
    ],
)
def test_a_system_is_not_measured_without_what_was_asked(
    systems: Any, monkeypatch: pytest.MonkeyPatch, system: str, words: list[str], is_heard: bool
) -> None:
    measured: list[str] = []
    monkeypatch.setitem(systems.SYSTEMS, system, lambda shape, arguments: measured.append(arguments.system))
    monkeypatch.setattr("torch.set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr("sys.argv", ["systems.py", system, *words])
    if is_heard:
        systems.main()
    else:
        with pytest.raises(SystemExit):
            systems.main()
    assert bool(measured) == is_heard

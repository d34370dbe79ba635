"""An extra that is missing is named with a command that works: shoal is on no registry."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shoal.errors import ShoalError, needs, to_install

CLONE = Path(__file__).parents[2]
EXTRAS = tomllib.loads((CLONE / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name != "dev"])
def test_in_a_clone_the_extra_is_that_of_the_clone(extra: str) -> None:
    assert to_install(extra) == f"pip install -e '{CLONE}[{extra}]'"


def test_a_missing_package_is_answered_with_that_command() -> None:
    with pytest.raises(ShoalError) as caught:
        needs("no_such_package", what="this", extra="wandb")
    assert caught.value.problems[0].fix == to_install("wandb")


def test_anywhere_else_its_packages_are_named(tmp_path: Path) -> None:
    """A copy of the package without the clone around it, with the metadata that pip leaves beside it."""
    package, record = tmp_path / "site/shoal", tmp_path / "site/shoal-1.0.dist-info"
    package.mkdir(parents=True)
    record.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("errors.py", "script_fixes.py"):
        (package / name).write_text((CLONE / "src/shoal" / name).read_text())
    needed = [f"Requires-Dist: {text}; extra == '{extra}'\n" for extra, all_of in EXTRAS.items() for text in all_of]
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shoal\nVersion: 1.0\n{''.join(needed)}")
    code = "from shoal.errors import to_install; print(to_install('hf'))"
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    words = [sys.executable, "-S", "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "pip install 'tokenizers>=0.19' 'datasets>=2.19' 'transformers>=5.21'"


def test_no_message_names_a_registry() -> None:
    found = [path for path in (CLONE / "src").rglob("*.py") if "pip install 'shoal" in path.read_text()]
    assert found == []

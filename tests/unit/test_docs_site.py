"""Pages that the README names are real ones, which `make docs` makes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools/docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_names_every_page_that_is_made(site: ModuleType) -> None:
    assert set(site.EXAMPLE.findall((ROOT / "README.md").read_text())) == set(site.EXAMPLES)


@pytest.mark.parametrize("name", ["report", "plan", "scale"])
def test_every_page_is_made(site: ModuleType, name: str) -> None:
    page = site.EXAMPLES[f"samples/{name}.html"]()
    assert page.startswith("<!doctype html>")
    assert "Content-Security-Policy" in page
    assert f"shoal {'bench scale' if name == 'scale' else name}" in page

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


IN_README = {"report", "watch", "profile", "scale", "plan", "verify"}


def test_readme_and_docs_name_every_page_that_is_made(site: ModuleType) -> None:
    named = [set(site.EXAMPLE.findall(path.read_text())) for path in (ROOT / "docs").glob("*.md")]
    assert set().union(*named) == set(site.EXAMPLES)
    assert set(site.EXAMPLE.findall((ROOT / "README.md").read_text())) == {f"samples/{name}.html" for name in IN_README}


def test_every_option_that_writes_a_page_has_an_example(site: ModuleType) -> None:
    """`--html` of each command, and the pages of `shoal report` and `shoal watch`."""
    verbs = {path.stem for path in (ROOT / "src/shoal/cli").rglob("*.py") if "html: Path" in path.read_text()}
    benches = {path.stem for path in (ROOT / "src/shoal/pages/bench").glob("*.py") if "make_page" in path.read_text()}
    assert (verbs - {"training"}) | benches | {"report", "watch", "profile"} == {
        Path(uri).stem for uri in site.EXAMPLES
    }


@pytest.mark.parametrize("name", [*IN_README, "step", "memory", "comm"])
def test_every_page_is_made(site: ModuleType, name: str) -> None:
    page = site.EXAMPLES[f"samples/{name}.html"]()
    assert page.startswith("<!doctype html>")
    assert "Content-Security-Policy" in page
    verb = {"profile": "report", **{bench: f"bench {bench}" for bench in site.BENCHES}}.get(name, name)
    assert f"shoal {verb}" in page
    assert len(page) < 500_000


def test_the_copy_of_a_live_page_is_of_a_run_that_trains_and_asks_no_server(site: ModuleType) -> None:
    page = site.example_watch()
    assert "running: a copy of this page at one moment" in page
    assert "Running, at step 60 of 120" in page
    assert "EventSource" not in page
    assert "connect-src" not in page

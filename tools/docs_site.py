"""Hooks of mkdocs: README, changelog, error pages and linked files join the site, and doctests become code.

The pages are written for a reader of the repository: they link to `../src/shoal/...` and `../benchmarks/...`. On the
site such a file lies under `repository/`, as text. A link to a file that does not exist is a warning, and so an error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ERROR_PAGES = "src/shoal/error_pages"
HOMES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{f"{ERROR_PAGES}/{path.name}": f"errors/{path.name}" for path in sorted((ROOT / ERROR_PAGES).glob("*.md"))},
}
CODE_HEADING = re.compile(r"^## ([A-Z]\d{3}): .+$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
EXAMPLE = re.compile(r"`(samples/\w+\.html)`")
"""A page that shoal has made for the site: the repository does not have it, so a page names it without a link."""
RECORDED = ROOT / "tools/examples"
"""Real runs, recorded by tools/record_examples.py."""
BENCHES = ("scale", "step", "memory", "comm")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
log = logging.getLogger("mkdocs.hooks.docs_site")


def example_plan() -> str:
    """A page of `shoal plan`."""
    from shoal.pages.plan.page import plan_page
    from shoal.planner.answer import answer
    from shoal.planner.request import PlanRequest
    from shoal.planner.search import Candidate

    seen: list[Candidate] = []
    request = PlanRequest(model="llama3-70b", cluster="h100:8x8", seq_len=8192, global_batch=128, pp=4)
    return plan_page(answer(request, seen), seen)


def example_report(name: str) -> str:
    """The page of a recorded run."""
    from shoal.pages.report import make_report
    from shoal.pages.run.read_run import read_run

    return make_report([read_run(Path(os.path.relpath(RECORDED / name)))])  # a page shows the path


def example_watch() -> str:
    """The page of `shoal watch` as it was at step 60 of the recorded run, which had not ended then."""
    from shoal.pages.live.page import live_page

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        path = Path("runs/tiny")
        path.mkdir(parents=True)
        for name in ("environment.json", "recipe.yaml"):
            shutil.copy(RECORDED / "run" / name, path)
        for name in ("metrics.jsonl", "events.jsonl"):
            lines = (RECORDED / "run" / name).read_text().splitlines(keepends=True)
            (path / name).write_text("".join(line for line in lines if json.loads(line)["step"] <= 60))
        return live_page(path, is_copy=True)


def example_verify() -> str:
    """A page of `shoal verify`."""
    from shoal.pages.verify.page import TensorError, verify_page

    found = json.loads((RECORDED / "verify.json").read_text())
    return verify_page(found["result"], [TensorError(*each) for each in found["tensors"]])


def example_bench(name: str) -> str:
    """A page of a benchmark."""
    module = importlib.import_module(f"shoal.pages.bench.{name}")
    return str(module.make_page(json.loads((RECORDED / f"{name}.json").read_text())))


EXAMPLES: dict[str, Callable[[], str]] = {
    "samples/plan.html": example_plan,
    "samples/report.html": lambda: example_report("run"),
    "samples/profile.html": lambda: example_report("profile"),
    "samples/watch.html": example_watch,
    "samples/verify.html": example_verify,
    **{f"samples/{name}.html": (lambda name=name: example_bench(name)) for name in BENCHES},  # type: ignore[misc]
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README and its neighbours, then every file that a page links to, and so on for pages that came so."""
    for path, uri in HOMES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for uri, make in EXAMPLES.items():
        files.append(File.generated(config, uri, content=make()))
    todo = [file for file in files if file.is_documentation_page()]
    while todo:
        page = todo.pop()
        for link in LINK.finditer(without_code(Path(str(page.abs_src_path)).read_text())):
            path = target(page.src_uri, link[1])
            uri = address(path)
            if not (ROOT / path).is_file():
                log.warning("%s links to %s, which is no file", page.src_uri, path)
            elif uri not in files.src_uris:
                files.append(added := File.generated(config, uri, abs_src_path=str(ROOT / path)))
                todo += [added] if added.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to where their targets lie on the site; give each error code its own anchor."""
    if page.file.src_uri.startswith("errors/"):
        markdown = CODE_HEADING.sub(r"\g<0> { #\1 }", markdown)
    folder = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        uri = address(target(page.file.src_uri, link[1]))
        return f"]({posixpath.relpath(uri, folder or '.')}{link[2] or ''})"

    def example(name: re.Match[str]) -> str:
        return f"[{name[1]}]({posixpath.relpath(name[1], folder or '.')})"

    code = FENCE.findall(markdown)
    prose = [EXAMPLE.sub(example, LINK.sub(moved, part)) for part in FENCE.split(markdown)]
    return "".join(text for pair in zip(prose, [*code, ""], strict=True) for text in pair)


def without_code(markdown: str) -> str:
    return FENCE.sub("", markdown)


def target(page: str, link: str) -> str:
    """The path in the repository that a link of a page means."""
    sources = {uri: path for path, uri in HOMES.items()}
    here = sources.get(page) or page.removeprefix("repository/")
    if here == page:
        here = f"docs/{page}"
    return os.path.normpath(posixpath.join(posixpath.dirname(here), link))


def address(path: str) -> str:
    """Where a file of the repository lies on the site. Source files become text, which a browser shows."""
    if path in HOMES:
        return HOMES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.txt"


class Doctests(griffe.Extension):
    """Fences the doctests of docstrings: Markdown would take `>>>` for a quotation of a quotation of a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Put a fence around every paragraph that begins with `>>>`."""
    return "\n\n".join(
        f"```pycon\n{part}\n```" if part.startswith(">>>") else part for part in re.split(r"\n{2,}", text)
    )

"""Take the screenshots of the docs: the example pages of `make docs`, in Chromium.

    make test-browser                                       # once: it installs playwright into .venv/browser
    PYTHONPATH=.venv/browser python tools/shoot_pages.py    # writes docs/images; needs Chromium and pillow

`tools/record_examples.py` makes the runs that are shown again. Look at the pictures before you commit them.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
FOLDER = Path(__file__).parents[1] / "docs/images"
MOST_BYTES = 150_000
COLOURS = 256
"""Of a picture: pages have few, and text stays sharp."""


@dataclass(frozen=True)
class Shot:
    """One screenshot."""

    page: str
    """The name of an example page."""
    height: int
    start: str = ""
    """The part that the picture begins with; empty: the top of the page."""
    width: int = 1120
    scheme: str = "light"


SHOTS = {
    "report": Shot("report", 1465),
    "report-phone": Shot("report", 1500, width=390, scheme="dark"),
    "profile": Shot("profile", 1570, "#profile"),
    "watch": Shot("watch", 1300, scheme="dark"),
    "plan": Shot("plan", 1420),
    "verify": Shot("verify", 1000),
    "scale": Shot("scale", 925),
    "step": Shot("step", 1000),
    "memory": Shot("memory", 860),
}


def shoot(browser: Any, shot: Shot, page: Path) -> bytes:
    """The picture, as PNG with few colours."""
    from PIL import Image

    options = {"width": shot.width, "height": 900}
    context = browser.new_context(color_scheme=shot.scheme, viewport=options)
    opened = context.new_page()
    opened.goto(page.as_uri())
    opened.wait_for_timeout(500)  # curves are drawn
    top = opened.query_selector(shot.start).bounding_box()["y"] - 24 if shot.start else 0
    clip = {"x": 0, "y": top, "width": shot.width, "height": shot.height}
    taken = opened.screenshot(full_page=True, clip=clip)
    context.close()
    written = io.BytesIO()
    few = (
        Image.open(io.BytesIO(taken))
        .convert("RGB")
        .quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    few.save(written, "PNG", optimize=True)
    return written.getvalue()


def main() -> int:
    """Take all pictures."""
    import docs_site
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        print("there is no Chromium: apt-get install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, shot in SHOTS.items():
            page = Path(folder) / f"{shot.page}.html"
            page.write_text(docs_site.EXAMPLES[f"samples/{shot.page}.html"]())
            picture = shoot(browser, shot, page)
            if len(picture) > MOST_BYTES:
                print(f"{name}.png has {len(picture):,} bytes, more than {MOST_BYTES:,}", file=sys.stderr)
                return 1
            (FOLDER / f"{name}.png").write_bytes(picture)
            print(f"docs/images/{name}.png  {len(picture):,} bytes")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

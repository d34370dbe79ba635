"""A page in a browser, and all that it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = {"phone": {"width": 390, "height": 844}, "desktop": {"width": 1280, "height": 900}}


class Visit:
    """A page that is open, and all that it did."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light", size: str = "desktop", **options: Any) -> None:
        self.context = browser.new_context(color_scheme=scheme, viewport=SIZES[size], **options)
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def click_everything(self) -> None:
        for summary in self.page.query_selector_all("summary"):
            summary.click()
        for button in self.page.query_selector_all("button, .u-series:not(.raw) th"):
            if button.is_visible():
                button.click()
        over = self.page.query_selector(".u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        self.page.mouse.move(box["x"] + 40, box["y"] + 40)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=3)
        self.page.mouse.up()
        over.dblclick()

    def close(self) -> None:
        """Nothing was said, and only the file and what is inside it was loaded."""
        assert self.messages == []
        assert [url for url in self.requests[1:] if not url.startswith("data:")] == []
        self.context.close()

"""Files at http:// and https://, by the standard library: fsspec's own reader needs a further package.

A URL that ends with a slash is a folder. Its files are the links of its page, as servers of static files write it;
folders inside it are not followed.
"""

from __future__ import annotations

import base64
import binascii
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from shoal.data.sources.remote.listing import Listing, RemoteFile
from shoal.errors import ShoalError
from shoal.version import __version__

SECONDS = 60.0
VERSIONS = ("ETag", "Last-Modified")
MOST_PAGE = 2**26
NO_HEAD = (403, 405, 501)
"""Answers of servers that know no HEAD, or do not allow it."""


class HttpStore:
    """A file or a folder of a web server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def list(self) -> Listing:
        """The file, or the links of the folder's page that lead to files in it."""
        if not _is_folder(self._url):
            name = unquote(urlsplit(self._url).path.rpartition("/")[2])
            return Listing([self.look_up(RemoteFile(name, self._url))], is_one_file=True)
        with _request(self._url) as page:
            text, base = page.read(MOST_PAGE).decode("utf-8", errors="replace"), page.geturl()
        files = [self.look_up(RemoteFile(name, url)) for name, url in sorted({*_links(text, base)})]
        return Listing(files, is_one_file=False)

    def look_up(self, file: RemoteFile) -> RemoteFile:
        """Size and version, from the headers."""
        try:
            answer = _request(file.place, "HEAD")
        except urllib.error.HTTPError as error:
            if error.code not in NO_HEAD:
                raise
            answer = _request(file.place)
        with answer:
            headers, place = answer.headers, answer.geturl()
        if _is_folder(place) and not _is_folder(file.place):  # the server has added the slash
            raise ShoalError(
                f"{file.place} is a folder of the server, and the URL of a folder ends with a slash",
                fix=f"--data.source {file.place}/",
                code="D097",
            )
        length = headers.get("Content-Length")
        return RemoteFile(
            file.name,
            file.place,
            int(length) if length and length.isdecimal() else None,
            next((f"{key} {headers[key]}" for key in VERSIONS if headers.get(key)), None),
            _hex(headers.get("Content-MD5")),
        )

    def open(self, file: RemoteFile) -> Any:
        """The body of the answer."""
        return _request(file.place)


def _is_folder(url: str) -> bool:
    return urlsplit(url).path.endswith("/")


def _request(url: str, method: str = "GET") -> Any:
    headers = {"User-Agent": f"shoal/{__version__}", "Accept-Encoding": "identity"}
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=SECONDS)
    except urllib.error.HTTPError as error:
        error.close()  # it is an open answer, too
        raise


def _hex(md5: str | None) -> str | None:
    try:
        return base64.b64decode(md5 or "", validate=True).hex() or None
    except (binascii.Error, ValueError):
        return None


def _links(text: str, base: str) -> Iterator[tuple[str, str]]:
    """The names and URLs of links that lead to a file directly below the page."""
    parser = _Links()
    parser.feed(text)
    above = urlsplit(base)
    for link in parser.found:
        target = urlsplit(urljoin(base, link))
        is_here = (target.scheme, target.netloc) == (above.scheme, above.netloc) and not target.query
        name = target.path.removeprefix(above.path)
        if is_here and target.path != name and name and "/" not in name:
            yield unquote(name), target._replace(fragment="").geturl()


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]

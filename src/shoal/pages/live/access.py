"""Who may read the live page: a browser on this machine that was given the token.

    http://127.0.0.1:PORT/?token=T  ──303──►  http://127.0.0.1:PORT/   with an HttpOnly cookie

The token leaves the address at once, so that neither the history nor a screenshot has it. A page of another site
cannot send the cookie (SameSite=Strict), and a foreign name that leads to 127.0.0.1 is rejected by its `Host`.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, field

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine; the port is free, since `ssh -L` may lead here from another one."""


@dataclass(frozen=True)
class Access:
    """The secrets of one server."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """The value of the cookie."""
    name: str = field(default_factory=lambda: f"shoal_{secrets.token_hex(4)}")
    """Of the cookie: all ports of a host share their cookies, so each server has a name of its own."""

    @property
    def set_cookie(self) -> str:
        """The header that gives the cookie."""
        return f"{self.name}={self.key}; HttpOnly; SameSite=Strict; Path=/"

    def takes_token(self, token: str) -> bool:
        """Whether this is the token."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def takes_cookie(self, header: str) -> bool:
        """Whether a Cookie header has the key."""
        parts = (part.strip().partition("=") for part in header.split(";"))
        values = [value for name, _, value in parts if name == self.name]
        return any(hmac.compare_digest(value.encode(), self.key.encode()) for value in values)


def is_own_host(headers: list[str]) -> bool:
    """Whether the `Host` headers of a request name this machine, once.

    >>> is_own_host(["localhost:8000"]), is_own_host(["evil.example:8000"]), is_own_host([])
    (True, False, False)
    """
    match = re.fullmatch(r"(.+?)(:\d{1,5})?", headers[0].strip().lower()) if len(headers) == 1 else None
    return match is not None and match[1] in HOSTS

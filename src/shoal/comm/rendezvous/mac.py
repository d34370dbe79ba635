"""HMAC-SHA256 over several values. It needs no torch, so a process that only supervises can use it."""

from __future__ import annotations

import hashlib
import hmac

TAG = 32
"""Bytes of a MAC."""


def mac(key: bytes, *parts: bytes | str | int) -> bytes:
    """HMAC-SHA256 over length-prefixed parts."""
    texts = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    message = b"".join(len(text).to_bytes(8, "big") + text for text in texts)
    return hmac.digest(key, message, hashlib.sha256)

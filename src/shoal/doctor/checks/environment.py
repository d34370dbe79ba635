"""Checks of the environment of a process: the encoding of text, and the cache of Hugging Face."""

from __future__ import annotations

import locale
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shoal.doctor.bounded import Check
from shoal.doctor.checks import files
from shoal.doctor.finding import Finding, Level, ok, warning

VARIABLES = ("LC_ALL", "LC_CTYPE", "LANG")
"""The first one that is set decides the encoding."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def checks() -> Iterator[Check]:
    """The checks of the environment."""
    yield Check("locale", text_encoding)
    if (found := hub_cache()) is not None:
        hangs = files.directory_check("HF cache", found, _fix()).on_timeout
        yield Check("HF cache", lambda: cache(found), files.SECONDS, hangs)


def text_encoding() -> Iterator[Finding]:
    """Python reads and names files in the encoding of the locale; ssh may start it with another one than a terminal."""
    name = next((f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)), "no LANG")
    used = {sys.getfilesystemencoding(), locale.getpreferredencoding(do_setlocale=False)}
    other = sorted(each for each in used if each.lower().replace("-", "") != "utf8")
    if other:
        evidence = f"text is read as {', '.join(other)} ({name}): other letters in names and files raise UnicodeError"
        yield warning("locale", evidence, "export LC_ALL=C.UTF-8")
    else:
        yield ok("locale", f"UTF-8 ({name})")


def hub_cache() -> Path | None:
    """Where huggingface_hub keeps models; None: it was named by no variable, and does not exist."""
    home = os.environ.get("HF_HOME")
    named = os.environ.get("HF_HUB_CACHE") or (os.path.join(home, "hub") if home else "")
    if named:
        return Path(named).expanduser()
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface/hub"
    return usual if os.path.isdir(usual) else None


def cache(path: Path) -> Iterator[Finding]:
    """Ranks of a host download a model once, if they can write there; without a network it must be there already."""
    if any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in OFFLINE):
        models = [each for each in path.glob("models--*") if os.path.isdir(each)] if os.path.isdir(path) else []
        if not models:
            evidence = f"{next(name for name in OFFLINE if os.environ.get(name))} is set, and {path} holds no model"
            fix = f"unset {' '.join(OFFLINE)}   # or HF_HOME=A_FOLDER_WITH_MODELS"
            yield warning("HF cache", evidence, fix)
        else:
            yield ok("HF cache", f"{path} holds {len(models):,} models; nothing is downloaded")
        return
    for each in files.writable("HF cache", path, _fix()):
        yield replace(each, level=Level.WARNING) if each.level is Level.FAIL else each  # not every run needs it


def _fix() -> str:
    return "export HF_HOME=/a/folder/with/room"

"""Follow a file of records that grows: read what was added, and notice when the file was replaced.

    cursor "77-2048": inode 77, read up to byte 2048, which is the end of a line

A resumed run replaces its metrics by those of the steps that it does not repeat. Then the page is made again.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.pages.run.own_files import LONGEST_LINE, Record, is_record, open_own, parse

MOST_AT_ONCE = 2**20
"""Bytes that one call reads; the next one continues."""


@dataclass(frozen=True)
class Cursor:
    """A place in a file."""

    inode: int = 0
    """Of the file; 0: there was none."""
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Read a cursor; the start of a file that is not there, if the text is none."""
        match = re.fullmatch(r"(\d{1,20})-(\d{1,20})", text)
        return cls(int(match[1]), int(match[2])) if match else cls()

    @classmethod
    def at_end(cls, path: Path) -> Cursor:
        """The end of the last whole line of a file."""
        try:
            with open_own(path) as file:
                found = os.fstat(file.fileno())
                start = max(0, found.st_size - LONGEST_LINE)
                file.seek(start)
                return cls(found.st_ino, start + file.read(found.st_size - start).rfind(b"\n") + 1)
        except OSError:
            return cls()


class Follower:
    """Reads the records that a file gains after a cursor."""

    def __init__(self, path: Path, cursor: Cursor | None = None) -> None:
        self._path = path
        self.cursor = cursor or Cursor()

    def new_records(self) -> list[Record] | None:
        """The records since the last call; None: the file was replaced, shortened or removed."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return None if self.cursor.inode else []
        if self.cursor.inode not in (0, found.st_ino) or found.st_size < self.cursor.offset:
            return None
        if found.st_size == self.cursor.offset:
            return []
        return self._read()

    def _read(self) -> list[Record] | None:
        start = self.cursor.offset
        try:
            with open_own(self._path) as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(max(0, start - 1))
                text = file.read(MOST_AT_ONCE)
        except OSError:
            return None
        if self.cursor.inode not in (0, inode) or (start and not text.startswith(b"\n")):
            return None
        text = text[1:] if start else text
        whole = text.rfind(b"\n") + 1
        # A line that does not fit is none of ours: step over what was read of it.
        whole = whole or (len(text) if len(text) >= MOST_AT_ONCE - 1 else 0)
        self.cursor = Cursor(inode, start + whole)
        return [record for line in text[:whole].splitlines() if is_record(record := parse(line[:LONGEST_LINE]))]

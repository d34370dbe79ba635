"""A disk that loses its power: which directories it may hold afterwards.

`Recorder` records what this process does to the files below a directory, in order. `states` replays a part of that
record and yields every directory that a power loss at that moment may leave:

    bytes of a file      as of its last fsync; of what was written later, all, a part, zeros in their place, or nothing
    names in a directory as of its last fsync; each later create, rename and remove may have happened or not, whatever
                         happened to the others; one rename is atomic
    a file in a folder   is lost with the folder, if the name of the folder is

That is what POSIX allows, and more than ext4, XFS and Btrfs do. The record is complete if all of it, replayed, is the
directory that is there: `everything` is compared with it. A sync that the recorder does not see makes the check
stricter.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import itertools
import os
import random
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tree = dict[str, bytes | None]
"""Path below the root → bytes of a file; None: a directory."""


@dataclass(frozen=True)
class Operation:
    """One call of the system; `done` stands for what the program reports as done."""

    kind: str
    path: str = ""
    other: str = ""
    """The new name of a rename, or what the path is a link to."""
    handle: int = 0
    """Of the open file that is written to or synced; unique in a record."""
    offset: int = 0
    data: bytes = b""
    done: Any = None
    site: str = ""
    """Which functions of shoal asked for a sync."""


class Recorder:
    """Records the operations of this process below a directory, of all its threads, while the context lasts."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.base = read_tree(root)
        """What was on the disk before."""
        self.log: list[Operation] = []
        self._lock = threading.RLock()
        self._handles: dict[int, int] = {}
        self._count = itertools.count(1)
        self._real: list[tuple[Any, str, Any]] = []

    def done(self, what: Any) -> None:
        """The program has reported this as done."""
        self.log.append(Operation("done", done=what))

    def __enter__(self) -> Recorder:
        for name in ("rename", "replace", "mkdir", "unlink", "remove", "rmdir", "link", "symlink", "truncate"):
            self._patch(os, name, self._of_paths(name, getattr(os, name)))
        for name in ("open", "close", "fsync", "fdatasync", "ftruncate", "write", "writev", "pwrite", "pwritev"):
            self._patch(os, name, self._of_handles(name, getattr(os, name)))
        opened = self._opened(io.open)
        self._patch(io, "open", opened)
        self._patch(builtins, "open", opened)
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, real in reversed(self._real):
            setattr(module, name, real)

    def _patch(self, module: Any, name: str, new: Any) -> None:
        self._real.append((module, name, getattr(module, name)))
        setattr(module, name, new)

    def below(self, path: Any, directory: int | None = None) -> str | None:
        """The path below the root; None: it is somewhere else."""
        text = os.fsdecode(path)
        if directory is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), text)
        folder, name = os.path.split(os.path.abspath(text))
        whole = os.path.join(os.path.realpath(folder), name)
        return os.path.relpath(whole, self.root) if f"{whole}/".startswith(f"{self.root}/") else None

    # ---- calls with a path -------------------------------------------------------------------------------------------

    def _of_paths(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        kind = {"replace": "rename", "remove": "unlink"}.get(name, name)

        def call(path: Any, *rest: Any, **words: Any) -> Any:
            with self._lock:
                found = self.below(path, words.get("dir_fd", words.get("src_dir_fd")))
                other = ""
                if kind in ("rename", "link"):
                    other = self.below(rest[0], words.get("dst_dir_fd")) or ""
                elif kind == "symlink":
                    found, other = self.below(rest[0], words.get("dir_fd")), os.fsdecode(path)
                value = real(path, *rest, **words)
                if found is not None:
                    self.log.append(Operation(kind, found, other))
                return value

        return call

    # ---- calls with an open file -------------------------------------------------------------------------------------

    def _of_handles(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        if name == "open":
            return self._os_open(real)

        def call(handle: int, *rest: Any) -> Any:
            with self._lock:
                known = self._handles.get(handle)
                if name == "close":
                    self._handles.pop(handle, None)
                elif name in ("fsync", "fdatasync"):
                    self._synced(handle, known)
                if known is None or name in ("close", "fsync", "fdatasync"):
                    return real(handle, *rest)
                offset = rest[1] if name.startswith("p") else self._place(handle)
                value = real(handle, *rest)
                if name == "ftruncate":
                    self.log.append(Operation("truncate", handle=known, offset=rest[0]))
                else:
                    data = b"".join(rest[0]) if name.endswith("v") else bytes(rest[0])
                    self.log.append(Operation("write", handle=known, offset=offset, data=data[:value]))
                return value

        return call

    def _os_open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            with self._lock:
                handle = real(path, flags, mode, dir_fd=dir_fd)
                found = self.below(path, dir_fd)
                if found is not None and flags & (os.O_WRONLY | os.O_RDWR):
                    self.opened(handle, found, is_cut=bool(flags & os.O_TRUNC))
                return handle

        return call

    def _opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **words: Any) -> Any:
            is_read = not set(mode) & set("wax+")
            if is_read or isinstance(file, int) or self.below(file) is None:
                return real(file, mode, buffering, *rest, **words)
            raw = _File(self, file, mode.replace("b", "").replace("t", ""), words.pop("opener", None))
            if buffering == 0:
                return raw
            held = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return held if "b" in mode else io.TextIOWrapper(held, *rest, **words)

        return call

    def opened(self, handle: int, path: str, *, is_cut: bool) -> None:
        """A file was opened to be written to."""
        self._handles[handle] = number = next(self._count)
        self.log.append(Operation("create", path, handle=number))
        if is_cut:
            self.log.append(Operation("truncate", handle=number, offset=0))

    def written(self, handle: int, offset: int, data: bytes) -> None:
        """Bytes went to a file."""
        self.log.append(Operation("write", handle=self._handles[handle], offset=offset, data=data))

    def _synced(self, handle: int, known: int | None) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            path = self.below(os.readlink(f"/proc/self/fd/{handle}"))
            if path is not None:
                self.log.append(Operation("sync directory", path, site=_site()))
        elif known is not None:
            self.log.append(Operation("sync file", handle=known, site=_site()))
        elif (path := self.below(os.readlink(f"/proc/self/fd/{handle}"))) is not None:  # opened to be read
            self.log.append(Operation("sync file", path, site=_site()))

    def _place(self, handle: int) -> int:
        is_appended = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_APPEND
        return os.fstat(handle).st_size if is_appended else os.lseek(handle, 0, os.SEEK_CUR)


class _File(io.FileIO):
    """A file that records what is written to it."""

    def __init__(self, recorder: Recorder, path: Any, mode: str, opener: Any) -> None:
        self._recorder = recorder
        with recorder._lock:
            super().__init__(path, mode, opener=opener)
            found = recorder.below(path)
            assert found is not None
            if opener is None:  # else `os.open` was called, which records it
                recorder.opened(self.fileno(), found, is_cut="w" in mode)

    def write(self, data: Any) -> int:
        with self._recorder._lock:
            offset = self._recorder._place(self.fileno())
            count = super().write(data) or 0
            self._recorder.written(self.fileno(), offset, bytes(memoryview(data).cast("B")[:count]))
            return count

    def truncate(self, size: int | None = None) -> int:
        raise NotImplementedError

    def close(self) -> None:
        with self._recorder._lock:
            if not self.closed:
                self._recorder._handles.pop(self.fileno(), None)
            super().close()


def _site() -> str:
    """The functions and lines of shoal, and of torch, that are being run, the innermost last."""
    frame, names = sys._getframe(1), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if {"shoal", "torch"} & set(path.parts) and "tests" not in path.parts:
            names.append(f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " > ".join(reversed(names))


# ---- replayed -------------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    """A file, a directory or a link, whatever its names are."""

    is_directory: bool = False
    link: str | None = None
    data: bytes = b""
    synced: bytes = b""
    """Its bytes as of its last sync."""
    names: dict[str, _Node] = field(default_factory=dict)
    """Of a directory: what every process sees."""
    synced_names: dict[str, _Node] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)


@dataclass(eq=False)
class _Change:
    """Of the names in one directory."""

    directory: _Node
    add: tuple[str, _Node] | None = None
    remove: tuple[str, _Node] | None = None

    def apply(self, names: dict[str, _Node]) -> None:
        if self.remove and names.get(self.remove[0]) is self.remove[1]:
            del names[self.remove[0]]
        if self.add:
            names[self.add[0]] = self.add[1]


class Replay:
    """A disk to which the operations of a record are applied one by one."""

    def __init__(self, base: Tree) -> None:
        self.root = _Node(is_directory=True)
        self._open: dict[int, _Node] = {}
        for path, data in sorted(base.items()):
            node = _Node(is_directory=data is None, data=data or b"", synced=data or b"")
            folder, name = self._split(path)
            folder.names[name] = folder.synced_names[name] = node

    def apply(self, operation: Operation) -> None:
        """One more."""
        act = getattr(self, f"_{operation.kind.replace(' ', '_')}", None)
        if act is not None:
            act(operation)

    def _split(self, path: str) -> tuple[_Node, str]:
        *folders, name = path.split("/")
        node = self.root
        for folder in folders:
            node = node.names[folder]
        return node, name

    def _change(self, folder: _Node, **what: Any) -> None:
        change = _Change(folder, **what)
        change.apply(folder.names)
        folder.pending.append(change)

    def _add(self, path: str, node: _Node) -> None:
        folder, name = self._split(path)
        self._change(folder, add=(name, node))

    def _mkdir(self, operation: Operation) -> None:
        self._add(operation.path, _Node(is_directory=True))

    def _symlink(self, operation: Operation) -> None:
        self._add(operation.path, _Node(link=operation.other))

    def _link(self, operation: Operation) -> None:
        folder, name = self._split(operation.path)
        self._add(operation.other, folder.names[name])

    def _unlink(self, operation: Operation) -> None:
        folder, name = self._split(operation.path)
        self._change(folder, remove=(name, folder.names[name]))

    _rmdir = _unlink

    def _rename(self, operation: Operation) -> None:
        (folder, name), (other, new) = self._split(operation.path), self._split(operation.other)
        assert folder is other, "a rename from one directory to another is not modelled"
        node = folder.names[name]
        self._change(folder, remove=(name, node), add=(new, node))

    def _create(self, operation: Operation) -> None:
        folder, name = self._split(operation.path)
        if name not in folder.names:
            self._add(operation.path, _Node())
        self._open[operation.handle] = folder.names[name]

    def _write(self, operation: Operation) -> None:
        node, begin = self._open[operation.handle], operation.offset
        before = node.data[:begin].ljust(begin, b"\0")
        node.data = before + operation.data + node.data[begin + len(operation.data) :]

    def _truncate(self, operation: Operation) -> None:
        node = self._open[operation.handle]
        node.data = node.data[: operation.offset].ljust(operation.offset, b"\0")

    def _sync_file(self, operation: Operation) -> None:
        folder, name = self._split(operation.path)
        node = self._open[operation.handle] if operation.handle else folder.names[name]
        node.synced = node.data

    def _sync_directory(self, operation: Operation) -> None:
        node = self.root
        for folder in operation.path.split("/") if operation.path != "." else ():
            node = node.names[folder]
        for change in node.pending:
            change.apply(node.synced_names)
        node.pending.clear()

    # ---- what is left of it ------------------------------------------------------------------------------------------

    def everything(self) -> Tree:
        """What processes see."""
        return dict(self._walk(self.root, "", lambda node: node.names, lambda node: node.data))

    def lost(self, kept: set[int], bytes_of: Callable[[_Node], bytes]) -> Tree:
        """What is left if of all pending changes only these happened, and files have such bytes."""

        def names(node: _Node) -> dict[str, _Node]:
            found = dict(node.synced_names)
            for change in node.pending:
                if id(change) in kept:
                    change.apply(found)
            return found

        return dict(self._walk(self.root, "", names, bytes_of))

    def _walk(
        self, node: _Node, path: str, names: Callable[[_Node], dict[str, _Node]], bytes_of: Callable[[_Node], bytes]
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, each in names(node).items():
            yield f"{path}{name}", None if each.is_directory else bytes_of(each)
            if each.is_directory:
                yield from self._walk(each, f"{path}{name}/", names, bytes_of)

    def nodes(self) -> list[_Node]:
        """All that some choice of changes may leave."""
        found: dict[int, _Node] = {}
        todo = [self.root]
        while todo:
            node = todo.pop()
            if id(node) not in found:
                found[id(node)] = node
                todo += node.synced_names.values()
                todo += [change.add[1] for change in node.pending if change.add]
        return list(found.values())


def _nothing(node: _Node) -> bytes:
    return node.synced


def _all(node: _Node) -> bytes:
    return node.data


def _half(node: _Node) -> bytes:
    begin = _num_equal(node.synced, node.data)
    return node.data[: (begin + len(node.data)) // 2]


def _zeros(node: _Node) -> bytes:
    begin = _num_equal(node.synced, node.data)
    return node.data[:begin].ljust(len(node.data), b"\0")


def _hole(node: _Node) -> bytes:
    """The last half of what was written, and zeros before it."""
    begin = _num_equal(node.synced, node.data)
    middle = (begin + len(node.data)) // 2
    return node.data[:begin].ljust(middle, b"\0") + node.data[middle:]


def _num_equal(one: bytes, other: bytes) -> int:
    """How many bytes two texts share at their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


WAYS = (_nothing, _all, _half, _zeros, _hole)
"""What may be left of the bytes of a file that was not synced."""


def states(disk: Replay, most: int, rng: random.Random) -> Iterator[Tree]:
    """Every directory that a power loss now may leave, or, if there are more than `most`, the extremes and some."""
    nodes = disk.nodes()
    changes = [id(change) for node in nodes for change in node.pending]
    dirty = [id(node) for node in nodes if not node.is_directory and node.data != node.synced]
    for kept, ways in _choices(changes, dirty, most, rng):
        how = dict(zip(dirty, ways, strict=True))
        yield disk.lost(set(kept), lambda node, how=how: how.get(id(node), _nothing)(node))  # type: ignore[misc]


def _choices(
    changes: Sequence[int], dirty: Sequence[int], most: int, rng: random.Random
) -> Iterator[tuple[Sequence[int], Sequence[Callable[[_Node], bytes]]]]:
    if 2 ** len(changes) * len(WAYS) ** len(dirty) <= most:
        subsets = (
            [change for change, is_kept in zip(changes, chosen, strict=True) if is_kept]
            for chosen in itertools.product((False, True), repeat=len(changes))
        )
        yield from itertools.product(subsets, itertools.product(WAYS, repeat=len(dirty)))
        return
    for way in WAYS:
        yield changes, [way] * len(dirty)
        yield [], [way] * len(dirty)
    for change in changes:
        yield [change], [_all] * len(dirty)
        yield [other for other in changes if other != change], [_nothing] * len(dirty)
        yield [other for other in changes if other != change], [_all] * len(dirty)
    for _ in range(most // 4):
        yield [change for change in changes if rng.random() < 0.5], [rng.choice(WAYS) for _ in dirty]


# ---- trees ----------------------------------------------------------------------------------------------------------


def read_tree(root: Path) -> Tree:
    """What is below a directory."""
    found: Tree = {}
    for path in sorted(root.rglob("*")):
        assert not path.is_symlink()
        found[str(path.relative_to(root))] = None if path.is_dir() else path.read_bytes()
    return found


def write_tree(root: Path, tree: Tree) -> None:
    """Make it so."""
    root.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)

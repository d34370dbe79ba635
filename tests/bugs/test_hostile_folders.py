"""Another user of the machine makes folders with the names of ours in the memory file system, and gets nothing.

Everyone can write to /dev/shm. A run looked there for folders that an earlier run of the same user had left, by their
name alone: a folder of another user with symbolic links copied a private file of the victim to a readable place, or put
weights into the checkpoints of the victim that the next run resumed from; a FIFO as its lock kept every run from
starting. Here an attacker (uid 12345) makes such folders, and a victim (root, or uid 23456) starts a run beside them:
it opens nothing that is not its own, writes nothing, removes nothing, and does not wait.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import CHUNK, Entry, File, Manifest, Piece
from shoal.checkpoint.storage.store import Store
from shoal.elastic.memory_tier import memory_tier
from shoal.errors import ShoalError
from shoal.train.recipe.saving.autosave import memory_folder_prefix
from shoal.train.recipe.saving.memory_flush import own_folder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")

ATTACKER, OTHER, VICTIM = 12345, 34567, 23456
MOST_SECONDS = 10.0
"""That a start may take beside any of the folders; it takes milliseconds."""
HUGE = 2**36
SHARD = "shard-00000.safetensors"
SECRET = b"a private file of the victim" * 10
RUN = Path("/somewhere/run")


@dataclass
class Scene:
    """A directory that stands for /dev/shm, and what there is to be attacked."""

    shared: Path
    """Everyone can write here; the sticky bit is set."""
    home: Path
    """The victim's, which nobody else can enter."""
    loot: Path
    """Everyone can read and write here."""
    uid: int
    """The victim's."""

    @property
    def secret(self) -> Path:
        return self.home / "secret" / SHARD

    @property
    def saves(self) -> Path:
        return self.home / "run" / "checkpoints"

    @property
    def left(self) -> Path:
        """A private folder of the victim in which a run has left a step: what an attacker would like us to follow."""
        return self.home / "left"


# ---- the folders ----------------------------------------------------------------------------------------------------


def checkpoint(root: Path, step: int, value: float = 666.0) -> None:
    """A sound step, with its files."""
    store = Store(root, Filesystem())
    draft = store.begin(step)
    file = shard_file.write(draft / SHARD, {"model/weight": torch.full((4,), value)}, store.disk)
    entry = Entry("F32", (4,), (Piece(SHARD, "model/weight", (0,), (4,)),))
    store.commit(Manifest(step=step, tensors={"model/weight": entry}, files={SHARD: file}, state={}))


def folder(path: Path, disk: Path, *, step: int | None = None) -> Path:
    """A folder as the launcher of a run leaves one."""
    path.mkdir()
    (path / "lock").touch()
    (path / "disk").write_text(str(disk))
    if step is not None:
        checkpoint(path, step)
    path.chmod(0o700)
    return path


def pretended(path: Path, disk: Path, size: int) -> Path:
    """A step whose manifest says that its file has a size, and whose file is still to be made."""
    folder(path, disk)
    step = path / "step-00000099"
    step.mkdir()
    file = File(size, ("0" * 64,) * -(-size // CHUNK))
    entry = Entry("U8", (size,), (Piece(SHARD, "model/weight", (0,), (size,)),))
    manifest = Manifest(step=99, tensors={"model/weight": entry}, files={SHARD: file}, state={})
    (step / "manifest.json").write_bytes(manifest.to_bytes())
    return step


def device(path: Path) -> None:
    """/dev/zero, which is read for ever."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:  # in a container without the right to
        path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def sock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.open(path.parent, os.O_RDONLY)  # names of sockets are short
        one.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def given_to(path: Path, uid: int) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, uid, uid, follow_symlinks=False)


def shard_link(at: Path, scene: Scene) -> None:
    (pretended(at, scene.loot / "checkpoints", len(SECRET)) / SHARD).symlink_to(scene.secret)


def shard_hard_link(at: Path, scene: Scene) -> None:
    step = pretended(at, scene.loot / "checkpoints", len(SECRET))
    given_to(at, ATTACKER)
    os.link(scene.secret, step / SHARD)


def weights(at: Path, scene: Scene) -> None:
    """To be resumed from: a sound step, newer than those of the victim."""
    folder(at, scene.saves, step=99)


def with_mode(mode: int) -> Callable[[Path, Scene], None]:
    return lambda at, scene: (weights(at, scene), at.chmod(mode))[0]


def instead_of(name: str, make: Callable[[Path], Any]) -> Callable[[Path, Scene], None]:
    """Sound, but for one file."""

    def act(at: Path, scene: Scene) -> None:
        weights(at, scene)
        (at / name).unlink()
        make(at / name)

    return act


def owned(uid: int, make: Callable[[Path, Scene], None]) -> Callable[[Path, Scene], None]:
    return lambda at, scene: (make(at, scene), given_to(at, uid))[0]


def of_victim(make: Callable[[Path, Scene], None], *, mode: int = 0o700, of: str = "") -> Callable[[Path, Scene], None]:
    """A folder of the victim itself, with a wrong mode or with something of another user in it."""

    def act(at: Path, scene: Scene) -> None:
        make(at, scene)
        given_to(at, scene.uid)
        at.chmod(mode)
        if of:
            given_to(at / of, ATTACKER)

    return act


STEP = "step-00000099"
BY_ATTACKER: dict[str, Callable[[Path, Scene], Any]] = {
    # The name itself is something else.
    "a link to a private folder of the victim": lambda at, scene: at.symlink_to(scene.left),
    "a link to nothing": lambda at, scene: at.symlink_to("/nowhere"),
    "a link to itself": lambda at, scene: at.symlink_to(at.name),
    "a FIFO": lambda at, scene: os.mkfifo(at),
    "a socket": lambda at, scene: sock(at),
    "a file": lambda at, scene: at.write_text("no folder"),
    # A folder of the attacker.
    "weights": weights,
    "weights in a folder that is open to all": with_mode(0o777),
    "a folder without rights": with_mode(0),
    "a lock that is a FIFO": instead_of("lock", os.mkfifo),
    "a lock that is a socket": instead_of("lock", sock),
    "a lock that is a link to a device": instead_of("lock", lambda path: path.symlink_to("/dev/zero")),
    "a lock that is a link to the secret": lambda at, scene: instead_of(
        "lock", lambda path: path.symlink_to(scene.secret)
    )(at, scene),
    "a place that is a FIFO": instead_of("disk", os.mkfifo),
    "a place without an end": instead_of("disk", lambda path: path.symlink_to("/dev/zero")),
    "a huge place": instead_of("disk", sparse),
    "a place that everyone can read": lambda at, scene: folder(at, scene.loot / "checkpoints", step=99),
    "a manifest that is a FIFO": instead_of(f"{STEP}/manifest.json", os.mkfifo),
    "a huge manifest": instead_of(f"{STEP}/manifest.json", sparse),
    "a shard that is a link to the secret": shard_link,
    "a shard that is a FIFO": instead_of(f"{STEP}/{SHARD}", os.mkfifo),
    "a huge shard": lambda at, scene: sparse(pretended(at, scene.saves, HUGE) / SHARD),
    "a step that is a link to one of the victim": lambda at, scene: (
        folder(at, scene.loot / "checkpoints") / STEP
    ).symlink_to(scene.left / "step-00000050"),
}
BY_ROOT: dict[str, Callable[[Path, Scene], Any]] = {
    # An attacker cannot make these, and they are refused all the same.
    "a device": lambda at, scene: device(at),
    "a shard that is a device": owned(ATTACKER, instead_of(f"{STEP}/{SHARD}", device)),
    "a shard that is a hard link to the secret": shard_hard_link,
    "a folder of a third user": owned(OTHER, weights),
    "a folder of the victim that is open to all": of_victim(weights, mode=0o777),
    "a folder of the victim that others can read": of_victim(weights, mode=0o755),
}
IN_OUR_OWN: dict[str, Callable[[Path, Scene], Any]] = {
    "a lock of another user": of_victim(weights, of="lock"),
    "a place that another user has named": of_victim(weights, of="disk"),
    "a step of another user": of_victim(weights, of=STEP),
    "a manifest of another user": of_victim(weights, of=f"{STEP}/manifest.json"),
    "a shard of another user": of_victim(weights, of=f"{STEP}/{SHARD}"),
    "a shard that is a link to the secret": of_victim(shard_link),
    "a shard that is a FIFO": of_victim(instead_of(f"{STEP}/{SHARD}", os.mkfifo)),
    "a lock that is a FIFO": of_victim(instead_of("lock", os.mkfifo)),
    "a step of another run": of_victim(lambda at, scene: folder(at, scene.loot / "checkpoints", step=99)),
}


# ---- users ----------------------------------------------------------------------------------------------------------


def as_user(uid: int, act: Callable[..., Any], *arguments: Any, seconds: float = MOST_SECONDS) -> Any:
    """What a function gives in a process of a user; fails if it takes longer."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_be, args=(uid, theirs, act, arguments))
    process.start()
    theirs.close()
    try:
        assert ours.poll(seconds), f"it takes more than {seconds} s"
        value, error = ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
    if error is not None:
        raise error
    return value


def _be(uid: int, pipe: Any, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    become(uid)
    try:
        pipe.send((act(*arguments), None))
    except BaseException as error:
        pipe.send((None, error))


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def start_beside(scene: Scene) -> list[str]:
    """What a run says that starts, and ends, with a launcher and without one."""
    said: list[str] = []
    with memory_tier(str(scene.shared), said.append, saves_to=str(scene.saves)) as root:
        is_own_and_empty(root, but={"lock"})
    assert not root.exists()
    found = own_folder(str(scene.shared), memory_folder_prefix(RUN), said.append)
    is_own_and_empty(found)
    found.rmdir()
    return said


def is_own_and_empty(root: Path, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """A new folder: what a run resumes from, it has put there itself."""
    status = root.lstat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.geteuid())
    assert {path.name for path in root.iterdir()} == but


# ---- what is watched -------------------------------------------------------------------------------------------------


class Watch:
    """Tells which files were opened, read or changed, by whoever (inotify)."""

    EVENTS = 0x1 | 0x2 | 0x4 | 0x20 | 0x100 | 0x200 | 0x40 | 0x80

    def __init__(self, *paths: Path) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.handle = self.libc.inotify_init1(os.O_NONBLOCK)
        self.paths = {self.libc.inotify_add_watch(self.handle, bytes(path), self.EVENTS): path for path in paths}
        assert -1 not in self.paths

    def seen(self) -> list[tuple[str, int]]:
        try:
            data, found = os.read(self.handle, 65536), []
        except BlockingIOError:
            return []
        while data:
            number, mask, _, length = struct.unpack_from("iIII", data)
            found.append((str(self.paths.get(number)), mask & 0xFFF))
            data = data[16 + length :]
        return found

    def close(self) -> None:
        os.close(self.handle)


def picture(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """All files below a path: kind and mode, owner, content."""
    found = {}
    for path in sorted((root, *root.rglob("*"))):
        if (
            path.name == "lock" and path.parent.name == "checkpoints"
        ):  # of this user, taken before anything is saved there
            continue
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) and status.st_size < 2**20 else b""
        found[str(path)] = (status.st_mode, status.st_uid, content)
    return found


@pytest.fixture(params=[pytest.param(0, id="root"), pytest.param(VICTIM, id="user", marks=pytest.mark.wide)])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    base = Path(tempfile.mkdtemp(prefix="hostile-", dir="/tmp"))
    base.chmod(0o755)
    made = Scene(base / "shared", base / "home", base / "loot", request.param)
    for path, mode in ((made.shared, 0o1777), (made.loot, 0o777), (made.home, 0o700)):
        path.mkdir()
        path.chmod(mode)
    made.secret.parent.mkdir()
    made.secret.write_bytes(SECRET)
    made.secret.chmod(0o600)
    checkpoint(made.saves, 3, value=1.0)
    folder(made.left, made.saves, step=50)
    given_to(made.home, made.uid)
    try:
        yield made
    finally:
        shutil.rmtree(base)


def names_for(scene: Scene) -> list[Path]:
    """Of the folders of a launcher, and of a run without one: as it is looked for, and as it was before."""
    own = memory_folder_prefix(RUN).replace(f"-{os.geteuid()}-", f"-{scene.uid}-")
    return [scene.shared / name for name in (f"shoal-tier-{scene.uid}-hostile", f"{own}hostile", own.rstrip("-"))]


def nothing_comes_of(scene: Scene) -> list[str]:
    """Start a run; returns what it says. Nothing is opened, read, written or removed that it should not."""
    before, hostile = picture(scene.home), picture(scene.shared)
    watch = Watch(scene.secret, scene.left, scene.left / "disk")
    said: list[str] = as_user(scene.uid, start_beside, scene)
    seen = watch.seen()
    watch.close()
    assert seen == []
    assert picture(scene.home) == before
    assert picture(scene.shared) == hostile
    assert list(scene.loot.iterdir()) == []
    return said


@pytest.mark.parametrize("what", BY_ATTACKER)
def test_a_folder_of_another_user_gives_nothing(scene: Scene, what: str) -> None:
    as_user(ATTACKER, lambda: [BY_ATTACKER[what](name, scene) for name in names_for(scene)] and None)
    said = nothing_comes_of(scene)
    assert len([line for line in said if "not a private folder of this user" in line]) == 2, said


@pytest.mark.parametrize("what", BY_ROOT)
def test_a_folder_that_only_looks_like_ours_gives_nothing(scene: Scene, what: str) -> None:
    for name in names_for(scene):
        BY_ROOT[what](name, scene)
    said = nothing_comes_of(scene)
    assert len([line for line in said if "not a private folder of this user" in line]) == 2, said


@pytest.mark.parametrize("what", IN_OUR_OWN)
def test_what_is_not_ours_in_a_folder_of_ours_gives_nothing(scene: Scene, what: str) -> None:
    """It cannot be there, unless somebody has moved it; and a run may have left a step of another one."""
    IN_OUR_OWN[what](names_for(scene)[0], scene)
    assert len(nothing_comes_of(scene)) == 1


def test_a_hundred_folders_are_told_in_one_line(scene: Scene) -> None:
    as_user(ATTACKER, lambda: [os.mkdir(f"{names_for(scene)[0]}-{number}\x1b[2J\n") for number in range(100)])
    said = nothing_comes_of(scene)
    assert len(said) == 1
    assert "and 99 more" in said[0]
    assert said[0].isprintable()


def test_a_step_that_is_our_own_is_saved(scene: Scene) -> None:
    """The rule does not refuse everything: a folder that a killed run of this user has left is saved, and goes."""
    left = names_for(scene)[0]
    as_user(scene.uid, weights, left, scene)
    (said,) = as_user(scene.uid, start_beside, scene)
    assert said == "step 99 was saved from memory to disk"
    assert Store(scene.saves).steps() == [3, 99]
    assert not left.exists()


def test_a_step_without_its_hash_is_not_saved(scene: Scene) -> None:
    left = names_for(scene)[0]
    as_user(scene.uid, weights, left, scene)
    data = bytearray((left / STEP / SHARD).read_bytes())
    data[-1] ^= 1
    (left / STEP / SHARD).write_bytes(data)
    (said,) = as_user(scene.uid, start_beside, scene)
    assert "does not have the hash" in said
    assert Store(scene.saves).steps() == [3]
    assert not list(scene.saves.glob(".draft*"))


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_memory_directory_in_which_others_can_rename_is_refused(scene: Scene, mode: int) -> None:
    scene.shared.chmod(mode)
    with pytest.raises(ShoalError, match="no sticky bit"):
        as_user(scene.uid, start_beside, scene)


def test_a_memory_directory_of_another_user_is_refused(scene: Scene) -> None:
    given_to(scene.shared, ATTACKER)
    with pytest.raises(ShoalError, match=f"belongs to user {ATTACKER}"):
        as_user(scene.uid, start_beside, scene)


# ---- a race ---------------------------------------------------------------------------------------------------------


def swap_for_ever(first: Path, second: Path) -> None:
    """Exchange two names, thousands of times a second."""
    libc = ctypes.CDLL(None, use_errno=True)
    while True:
        if libc.renameat2(-100, bytes(first), -100, bytes(second), 2):
            raise OSError(ctypes.get_errno(), "renameat2")
        time.sleep(1e-5)  # without it, on busy cores, a reader may wait for the folder's lock in the kernel for minutes


def start_often(scene: Scene, seconds: float) -> int:
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        start_beside(scene)
        count += 1
    return count


@pytest.mark.parametrize("what", ["a folder", "a lock", "a step"])
def test_what_is_swapped_between_a_look_and_its_use_gives_nothing(scene: Scene, what: str) -> None:
    """A folder of the attacker and a link to a private folder of the victim change places all the time: the link leads
    to what would pass every check of owner and mode, and holds a step that is newer than those on the disk."""
    if what == "a folder":
        pairs = [(name, name.with_name(f"other-{number}")) for number, name in enumerate(names_for(scene)[:2])]
        for name, other in pairs:
            as_user(ATTACKER, weights, name, scene)
            as_user(ATTACKER, os.symlink, scene.left, other)
    else:
        inner, target = {"a lock": ("lock", scene.secret), "a step": (STEP, scene.left / "step-00000050")}[what]
        pairs = [(name / inner, name / "other") for name in names_for(scene)[:2]]
        for (_, other), name in zip(pairs, names_for(scene), strict=False):
            as_user(ATTACKER, weights, name, scene)
            as_user(ATTACKER, os.symlink, target, other)
    before = picture(scene.home)
    watch = Watch(scene.secret, scene.left, scene.left / "disk")
    context = multiprocessing.get_context("fork")
    attackers = [context.Process(target=_swap, args=pair) for pair in pairs]
    for one in attackers:
        one.start()
    try:
        count = as_user(scene.uid, start_often, scene, 0.7)
        assert all(one.is_alive() for one in attackers)
    finally:
        for one in attackers:
            one.kill()
            one.join()
    assert count > 10
    assert watch.seen() == []
    watch.close()
    assert picture(scene.home) == before
    assert list(scene.loot.iterdir()) == []


def _swap(first: Path, second: Path) -> None:
    become(ATTACKER)
    swap_for_ever(first, second)

"""The file with the key of a run: no other user chooses its content; an unfit one does not end a run on one host."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest

from shoal.comm.rendezvous import key
from shoal.comm.rendezvous.key import Key, key_of
from shoal.comm.rendezvous.launcher_environment import Placement
from tests.rejects import rejects
from tests.warm import warm_python

KNOWN = "a text that another user knows"
ONE_HOST = Placement(rank=0, world_size=2, local_rank=0, local_world_size=2)
HOSTS = Placement(rank=0, world_size=2, local_rank=0, local_world_size=1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the key is by default; /tmp is a folder of this test."""
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(key, "_SHARED", tmp_path / "tmp")
    return tmp_path / "home" / ".config" / "shoal" / "key"


@pytest.fixture
def fallback(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the key is if the home directory cannot be written, which it cannot."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    return tmp_path / "tmp" / f"shoal-{os.geteuid()}" / "key"


def private(path: Path, text: str) -> Path:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(0o600)
    path.write_text(text)
    return path


# ---- in a directory that all users share ----------------------------------------------------------------------------


def test_the_fallback_is_private(fallback: Path) -> None:
    assert key_of(ONE_HOST).secret == key_of(ONE_HOST).secret
    assert key_of(ONE_HOST).source == str(fallback)
    assert fallback.stat().st_mode & 0o777 == 0o600
    assert fallback.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(fallback.parent) == ["key"]


@pytest.mark.parametrize("what", ["the folder", "the file", "a folder of others"])
def test_another_user_cannot_choose_the_key(fallback: Path, tmp_path: Path, what: str) -> None:
    """A link leads to a file of this user with a known text, or the folder lets others replace the file."""
    known = private(tmp_path / "mine" / "key", KNOWN)
    if what == "the folder":
        fallback.parent.symlink_to(known.parent)
    elif what == "the file":
        fallback.parent.mkdir(mode=0o700)
        fallback.symlink_to(known)
    else:
        private(fallback, KNOWN)
        fallback.parent.chmod(0o777)
    with rejects("N008", match=r"no key file can be used[^§]*fix: export SHOAL_KEY="):
        key_of(ONE_HOST)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_fallback_of_another_user_is_rejected(fallback: Path) -> None:
    private(fallback, KNOWN)
    os.chown(fallback.parent, 12345, 12345)
    with rejects("N008", match=r"it belongs to user 12345[^§]*fix: export SHOAL_KEY="):
        key_of(ONE_HOST)


def test_a_link_in_the_home_directory_is_not_followed(home: Path, tmp_path: Path) -> None:
    home.parent.mkdir(parents=True)
    home.symlink_to(private(tmp_path / "mine" / "key", KNOWN))
    with rejects("N008", "SHOAL_KEY"):
        key_of(HOSTS)


# ---- made at once ---------------------------------------------------------------------------------------------------

MAKE = """
import resource, signal
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.rendezvous.key import key_of

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as on a full disk, a file can be made, and not written
try:
    key_of(Placement(rank=0, world_size=2, local_rank=0, local_world_size=1))
except BaseException as error:
    print(type(error).__name__, error)
"""


def test_a_full_disk_leaves_no_empty_key(home: Path) -> None:
    said = subprocess.run([warm_python(), "-c", MAKE], capture_output=True, text=True, check=True).stdout
    assert said.startswith("ShoalError no key file can be used")
    assert os.listdir(home.parent) == []
    assert key_of(HOSTS).source == str(home)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
def test_all_ranks_have_the_key_that_one_has_made(
    home: Path, is_there: bool, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file, which a full disk has left, is replaced. Some file systems have no links."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for _ in range(20):
        home.parent.mkdir(parents=True, exist_ok=True)
        home.unlink(missing_ok=True)
        if is_there:
            private(home, "")
        found: list[Key] = []
        threads = [threading.Thread(target=lambda: found.append(key_of(HOSTS))) for _ in range(8)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len({one.secret for one in found}) == 1
        assert os.listdir(home.parent) == ["key"]


def no_links(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


# ---- unfit files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unfit", ["0777", "0640", "another user", "a directory"])
def test_an_unfit_file_does_not_end_a_run_on_one_host(home: Path, tmp_path: Path, unfit: str) -> None:
    """On CIFS every file has mode 0777, and on some file systems it belongs to another user."""
    private(home, KNOWN)
    if unfit == "another user":
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(home, 12345, 12345)
    elif unfit == "a directory":
        home.unlink()
        home.mkdir()
    else:
        home.chmod(int(unfit, 8))
    assert key_of(ONE_HOST).source == str(tmp_path / "tmp" / f"shoal-{os.geteuid()}" / "key")
    with rejects("N008", "SHOAL_KEY=$", "hex 32"):
        key_of(HOSTS)


@pytest.mark.parametrize("name", ["a folder", "~no-such-user/key", "file/key", "shared", "fifo"])
def test_a_named_file_that_cannot_be_read_is_one_message(tmp_path: Path, home: Path, name: str) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "file").touch()
    private(tmp_path / "shared", KNOWN).chmod(0o644)
    os.mkfifo(tmp_path / "fifo", 0o600)
    path = name if name.startswith("~") else str(tmp_path / name)
    named = Placement(rank=0, world_size=2, local_rank=0, local_world_size=2, key_file=path)
    with rejects("N008", match=r"SHOAL_KEY_FILE=[^§]*fix: "):
        key_of(named)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_named_file_of_another_user_is_one_message(tmp_path: Path) -> None:
    path = private(tmp_path / "key", KNOWN)
    script = (
        "import os; from shoal.comm.rendezvous.key import key_of\n"
        "from shoal.comm.rendezvous.launcher_environment import Placement\n"
        "from shoal.errors import ShoalError\n"
        "os.setuid(12345)\n"
        f"place = Placement(rank=0, world_size=2, local_rank=0, local_world_size=2, key_file={str(path)!r})\n"
        "try:\n    key_of(place)\nexcept ShoalError as error:\n    print(error)\n"
    )
    said = subprocess.run([warm_python(), "-c", script], capture_output=True, text=True, check=False)
    assert "SHOAL_KEY_FILE=" in said.stdout, said.stderr
    assert "Permission denied" in said.stdout
    assert "fix: " in said.stdout

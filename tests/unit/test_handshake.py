"""Ranks that prove to each other that they hold the key of the run, over a store that anyone can write to."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shoal.comm.rendezvous import handshake
from shoal.comm.rendezvous.authenticated_store import SealedStore
from shoal.comm.rendezvous.handshake import agree
from shoal.comm.rendezvous.key import Key, key_of
from shoal.comm.rendezvous.launcher_environment import Placement, read_environment
from shoal.comm.rendezvous.network_interface import listening_socket
from shoal.errors import RunFailed, ShoalError
from tests.rejects import rejects

GOOD = Key(b"k" * 32, "a file")


def place_of(rank: int, size: int) -> Placement:
    return Placement(rank=rank, world_size=size, local_rank=rank, local_world_size=size)


def meet(store: dist.Store, keys: list[Key], run: str = "a run", seconds: float = 10.0) -> list[bytes | ShoalError]:
    """What every rank has in the end."""
    found: dict[int, bytes | ShoalError] = {}

    def act(rank: int) -> None:
        try:
            found[rank] = agree(store, place_of(rank, len(keys)), keys[rank], run=run, timeout=seconds)
        except ShoalError as error:
            found[rank] = error

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(len(keys))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[rank] for rank in range(len(keys))]


def test_all_have_one_session_and_another_one_each_time() -> None:
    store = dist.HashStore()
    first, second = meet(store, [GOOD] * 3), meet(store, [GOOD] * 3)  # what the first ones wrote is still there
    for session in (first, second):
        assert isinstance(session[0], bytes)
        assert session[0] == session[1] == session[2]
    assert first[0] != second[0]


def test_another_key_is_named_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "GRACE_PERIOD", 0.3)
    monkeypatch.setattr(handshake, "LINGER", 0.6)
    began = time.monotonic()
    first, second, third = map(str, meet(dist.HashStore(), [GOOD, Key(b"x" * 32, "another file"), GOOD]))
    assert time.monotonic() - began < 5
    assert first.startswith("rank 1 was rejected: it did not prove that it holds the key of this run, which rank 0 on")
    assert second.startswith("rank 1 and rank 0 do not hold the same key")
    assert "another file" in second
    assert third.startswith("rank 1 was rejected")


def test_what_earlier_ranks_wrote_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger has all values of a meeting, and writes them again without end in place of rank 1."""
    monkeypatch.setattr(handshake, "GRACE_PERIOD", 0.3)
    monkeypatch.setattr(handshake, "LINGER", 0.3)
    store = dist.HashStore()
    meet(store, [GOOD] * 2)
    names = ["hello 1", "proof 1", "answer 1"]
    values = [store.get(name) for name in names]
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(0.001):
            for name, value in zip(names, values, strict=True):
                store.set(name, value)  # type: ignore[arg-type]

    stranger = threading.Thread(target=repeat)
    stranger.start()
    with rejects("N005", "rank 1"):
        agree(store, place_of(0, 2), GOOD, run="a run", timeout=5)
    is_over.set()
    stranger.join()


def test_a_stranger_that_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written to every name before rank 1 comes, also where rank 0 looks last."""
    monkeypatch.setattr(handshake, "GRACE_PERIOD", 0.1)
    monkeypatch.setattr(handshake, "PAUSE", 0.1)
    store, sessions = dist.HashStore(), []
    first = threading.Thread(target=lambda: sessions.append(agree(store, place_of(0, 2), GOOD, run="a run", timeout=5)))
    first.start()
    time.sleep(0.1)
    for name in ("challenge", "hello 1", "answer 1", "proof 1"):
        store.set(name, "garbage")
    time.sleep(0.4)
    sessions.append(agree(store, place_of(1, 2), GOOD, run="a run", timeout=5))
    first.join()
    assert len(set(sessions)) == 1


class Disturbed:
    """A store in which the first value of some names is overwritten by another process."""

    def __init__(self, store: dist.Store, names: set[str]) -> None:
        self.store, self.names = store, set(names)

    def set(self, name: str, value: bytes) -> None:
        is_first = bool(value) and name in self.names
        self.names.discard(name)
        self.store.set(name, "garbage" if is_first else value)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("name", ["challenge", "hello 1", "answer 1", "proof 1", "done"])
def test_a_value_that_is_overwritten_once_is_written_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "GRACE_PERIOD", 1.0)
    began = time.monotonic()
    first, second = meet(Disturbed(dist.HashStore(), {name}), [GOOD] * 2)  # type: ignore[arg-type]
    assert isinstance(first, bytes)
    assert first == second
    assert time.monotonic() - began < 5


def test_a_rank_of_another_generation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "GRACE_PERIOD", 0.3)
    monkeypatch.setattr(handshake, "LINGER", 0.6)
    store, found = dist.HashStore(), []

    def late() -> None:
        try:
            agree(store, place_of(1, 2), GOOD, run="generation 0", timeout=5)
        except ShoalError as error:
            found.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    with rejects("N005", "rank 1"):
        agree(store, place_of(0, 2), GOOD, run="generation 1", timeout=5)
    thread.join()
    assert len(found) == 1


def test_a_rank_that_does_not_come_is_named() -> None:
    with rejects("N006", "rank 0 of 3", "0.2 s", "ranks 1, 2"):
        agree(dist.HashStore(), place_of(0, 3), GOOD, run="a run", timeout=0.2)


# ---- the store ------------------------------------------------------------------------------------------------------


def test_sealed_values_are_read_by_their_session_under_their_name_alone() -> None:
    store = dist.HashStore()
    sealed = SealedStore(store, b"session")
    for value in (b"", b"\0\0address", os.urandom(300)):
        sealed.set("a", value)
        assert sealed.get("a") == value
    assert b"address" not in store.get("a")
    store.set("b", store.get("a"))  # type: ignore[arg-type]
    for reader, name in ((sealed, "b"), (SealedStore(store, b"another session"), "a")):
        with rejects(
            "N011", match=f"the value of '{name}' in the store was not written by a rank of this run", kind=RunFailed
        ):
            reader.get(name)
    store.set("a", "garbage")
    with rejects("N011", kind=RunFailed):
        sealed.get("a")


def test_rank_0_listens_on_one_interface() -> None:
    for host, address in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")):
        if address == "::1" and not socket.has_dualstack_ipv6():
            continue
        with listening_socket(host, 0, is_one_host=True) as found:
            assert found.getsockname()[0] == address
    with listening_socket("127.0.0.1", 0, is_one_host=False) as found:  # other hosts could not reach it
        assert found.getsockname()[0] in ("::", "0.0.0.0")


# ---- the key --------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".config" / "shoal" / "key"


def test_the_first_rank_makes_the_key_and_all_have_it(home: Path) -> None:
    found: list[Key] = []
    threads = [threading.Thread(target=lambda: found.append(key_of(place_of(0, 8)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.secret for one in found}) == 1
    assert len(found) == 8
    assert home.stat().st_mode & 0o777 == 0o600
    assert home.parent.stat().st_mode & 0o777 == 0o700
    assert "secret" not in repr(found[0])


def test_a_key_that_others_can_read_is_rejected(home: Path) -> None:
    far = Placement(rank=0, world_size=2, local_rank=0, local_world_size=1)
    key_of(far)
    home.chmod(0o640)
    with rejects("N008", "0600", "0640"):
        key_of(far)
    home.unlink()
    os.mkfifo(home, 0o600)
    with rejects("N008", match="it must be a regular file, got a FIFO"):
        key_of(far)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_key_of_another_user_is_rejected(home: Path) -> None:
    far = Placement(rank=0, world_size=2, local_rank=0, local_world_size=1)
    key_of(far)
    os.chown(home, 12345, 12345)
    with rejects("N008", "user 0", "12345"):
        key_of(far)


@pytest.mark.parametrize("text", ["\n", "short"])
def test_a_short_key_is_rejected(home: Path, text: str) -> None:
    home.parent.mkdir(parents=True)
    home.touch(0o600)
    home.write_text(text)
    with rejects("N009", match=r"must have 16 to 4096 characters, got [05] \[N009\]\n"):
        key_of(place_of(0, 2))


def test_variables_name_the_key(tmp_path: Path, home: Path) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    ranks |= {"MASTER_ADDR": "here", "MASTER_PORT": "1"}

    def found(**more: str) -> Key:
        place = read_environment({**ranks, **more})
        assert place is not None
        assert "sixteen" not in repr(place)
        return key_of(place)

    assert found(SHOAL_KEY="sixteen characters").source == "SHOAL_KEY"
    with rejects("N009", match=r"SHOAL_KEY must have at least 16 characters, got 5[^§]*openssl rand"):
        found(SHOAL_KEY="short")
    path = tmp_path / "of-mine"
    with rejects("N008", match="does not exist"):
        found(SHOAL_KEY_FILE=str(path))
    path.touch(0o600)
    path.write_text("sixteen characters\n")
    assert found(SHOAL_KEY_FILE=str(path)).secret == found(SHOAL_KEY="sixteen characters").secret
    assert not home.exists()


def test_several_hosts_need_a_home_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    far = Placement(rank=0, world_size=2, local_rank=0, local_world_size=1)
    with rejects("N008", match=r"no key file can be used: [^§]*on every host"):
        key_of(far)

"""Data at URLs is downloaded once, checked and used again; hostile names and cut-off files are rejected."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest

from shoal.config.recipe import DataSection
from shoal.data.dataset import Dataset
from shoal.data.sources.open import open_datasets
from shoal.data.sources.remote import download, isolated, job, object_store
from shoal.data.sources.remote.listing import Listing, RemoteFile, checked
from tests.rejects import rejects


class Server(SimpleHTTPRequestHandler):
    """A server of static files that counts requests, and can lie."""

    asked: ClassVar[Counter[tuple[str, str]]] = Counter()
    cut: str = ""
    """A file of which half is sent."""
    md5: str = ""

    def do_GET(self) -> None:
        self.asked["GET", self.path] += 1
        if self.path == self.cut:
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            return
        super().do_GET()

    def do_HEAD(self) -> None:
        self.asked["HEAD", self.path] += 1
        super().do_HEAD()

    def end_headers(self) -> None:
        if self.md5:
            self.send_header("Content-MD5", self.md5)
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The URL of a folder with two token shards and a page."""
    folder = tmp_path / "site" / "shards"
    folder.mkdir(parents=True)
    for number in range(2):
        np.arange(50 + number, dtype=np.uint16).tofile(folder / f"{number}.bin")
    (folder / "about this.pdf").write_bytes(b"no data")
    handler = type("Handler", (Server,), {"asked": Counter()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path / "site")))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    Server.asked = handler.asked  # type: ignore[attr-defined]
    yield f"http://127.0.0.1:{server.server_address[1]}/shards/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(Server, "cut", "")
    monkeypatch.setattr(Server, "md5", "")
    next_job(monkeypatch)
    return tmp_path / "cache" / "shoal" / "data" / "remote"


JOBS = iter(range(10**6))


def next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(JOBS)
    monkeypatch.setattr(download, "job_of_this_process", lambda: f"job {number}")


def opened(source: str, **settings: Any) -> tuple[Dataset, Dataset]:
    return open_datasets(DataSection(source=source, **{"seq_len": 4, "validation": 0, **settings}), seed=0)


def local(tmp_path: Path) -> str:
    return opened(str(tmp_path / "site" / "shards"))[0].digest()


def test_a_folder_without_its_slash_gets_the_slash_as_a_fix(site: str) -> None:
    with rejects("D097", f"{site[:-1]} is a folder of the server", f"--data.source {site}"):
        opened(site[:-1])


def test_a_folder_of_a_web_server_is_downloaded_once(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert opened(site)[0].digest() == local(tmp_path)
    assert Server.asked["GET", "/shards/"] == 1  # one list, although the source is opened in several steps
    assert Server.asked["GET", "/shards/0.bin"] == Server.asked["GET", "/shards/1.bin"] == 1
    assert Server.asked["GET", "/shards/about%20this.pdf"] == 0
    Server.asked.clear()
    opened(site)  # another rank of the same job
    assert not Server.asked
    next_job(monkeypatch)
    opened(site)
    assert Server.asked["GET", "/shards/"] == 1
    assert Server.asked["GET", "/shards/0.bin"] == 0
    next_job(monkeypatch)  # the next run finds one file changed, one gone and one new
    folder = tmp_path / "site" / "shards"
    np.arange(70, dtype=np.uint16).tofile(folder / "0.bin")
    os.utime(folder / "0.bin", (1, 1))
    (folder / "1.bin").rename(folder / "2.bin")
    Server.asked.clear()
    assert opened(site)[0].digest() == local(tmp_path)
    assert {path for method, path in Server.asked if method == "GET"} == {"/shards/", "/shards/0.bin", "/shards/2.bin"}
    assert "0.bin of" in capsys.readouterr().err


def test_one_file_keeps_its_ending_and_a_damaged_copy_is_replaced(site: str, tmp_path: Path, cache: Path) -> None:
    expected = opened(str(tmp_path / "site" / "shards" / "0.bin"))[0].digest()
    assert opened(f"{site}0.bin?key=1")[0].digest() == expected
    (copy,) = cache.rglob("0.bin")
    os.truncate(copy, 10)
    assert opened(f"{site}0.bin?key=1")[0].digest() == expected
    assert oct(copy.parent.parent.stat().st_mode & 0o777) == "0o700"


def test_without_the_server_the_complete_copy_is_used(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = opened(site)[0].digest()
    (tmp_path / "site" / "shards").rename(tmp_path / "site" / "gone")
    next_job(monkeypatch)
    assert opened(site)[0].digest() == before
    assert "cannot be listed" in capsys.readouterr().err
    with rejects("D091", "404"):
        opened(f"{site}0.bin")


def test_a_file_that_is_cut_off_or_changed_is_rejected(site: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "cut", "/shards/1.bin")
    with rejects("D092", "102 bytes were listed, and 51 arrived"):
        opened(site)
    assert Server.asked["GET", "/shards/1.bin"] == download.TRIES
    assert [file.name for file in cache.rglob("*.bin")] == ["0.bin"]  # neither a part nor a temporary file
    monkeypatch.setattr(Server, "cut", "")
    Server.asked.clear()
    opened(site)
    assert Server.asked["GET", "/shards/0.bin"] == 0  # the part that was complete
    monkeypatch.setattr(Server, "md5", base64.b64encode(hashlib.md5(b"other").digest()).decode())
    with rejects("D092", hashlib.md5(b"other").hexdigest()):
        opened(f"{site}0.bin")


def test_a_file_that_is_replaced_during_its_download_is_rejected(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(range(100))
    look_up = download.HttpStore.look_up
    monkeypatch.setattr(
        download.HttpStore,
        "look_up",
        lambda self, file: RemoteFile(file.name, file.place, look_up(self, file).size, f"ETag {next(versions)}"),
    )
    with rejects("D092", "changed while it was downloaded"):
        opened(f"{site}0.bin")


@pytest.mark.parametrize("is_isolated", [False, True])
def test_any_file_system_of_fsspec(is_isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "starts_threads", lambda protocol: is_isolated)
    memory = fsspec.filesystem("memory")
    where = f"memory://bucket{is_isolated}"
    for name in ("a/0.jsonl", "b.jsonl", ".hidden.jsonl", "image.png"):
        memory.pipe_file(f"{where}/{name}", b'{"text": "hello there"}\n' * 9)
    assert "18 JSONL documents" in opened(where, format="jsonl")[0].describe()
    assert "9 JSONL documents" in opened(f"{where}/b.jsonl")[0].describe()
    assert "9 JSONL documents" in opened(f"{where}/*.jsonl")[0].describe()
    with rejects("D094", "parquet"):
        opened(where, format="parquet")
    with rejects("D094", "memory://none/a.bin", "got none"):
        opened("memory://none/a.bin")


def test_a_file_url_is_a_path(site: str, tmp_path: Path, cache: Path) -> None:
    assert opened(f"file://{tmp_path}/site/shards", format="tokens")[0].digest() == local(tmp_path)
    assert not cache.exists()
    with rejects("D001", "nowhere"):
        opened(f"file://{tmp_path}/nowhere")


@pytest.mark.parametrize(
    "name", ["../escaped.bin", "/etc/passwd", "a/../../b.bin", "a\\..\\b.bin", "a//b.bin", "a\n.bin"]
)
def test_a_name_that_leaves_the_folder_is_rejected(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        download.ObjectStore,
        "list",
        lambda self: Listing([RemoteFile("good.bin", "x"), RemoteFile(name, "y")], is_one_file=False),
    )
    with rejects("D090", repr(name)):
        opened("memory://hostile/")
    assert not list(cache.rglob("*.bin"))


def test_a_list_must_be_one_of_files() -> None:
    for names in (["a.bin", "a.bin"], ["a", "a/b.bin"]):
        with rejects("D090", "the same name twice"):
            checked("s3://x", [RemoteFile(name, name) for name in names], "auto")


def test_a_full_disk_is_noticed_before_the_download(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = type("Usage", (), {"free": 100})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: free)
    with rejects("D093", "202 bytes", "100 bytes"):
        opened(site)


def test_unknown_protocols() -> None:
    with rejects("D091", "s33://", "--data.source s3://..."):
        opened("s33://bucket/a.bin")


def test_processes_of_a_host_download_once(site: str, tmp_path: Path) -> None:
    """Real processes at the same time, as ranks of a launcher: each has the data, and each file was sent once."""
    children = []
    for rank in range(3):
        child = os.fork()
        if not child:
            os.environ.update(RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
            download.job_of_this_process = job.job_of_this_process
            try:
                os._exit(0 if opened(site)[0].digest() == local(tmp_path) else 1)
            except BaseException:
                os._exit(2)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert Server.asked["GET", "/shards/"] == 1
    assert Server.asked["GET", "/shards/0.bin"] == Server.asked["GET", "/shards/1.bin"] == 1


def test_a_child_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "starts_threads", lambda protocol: True)
    with rejects("D095", "s3://", "code 3"):
        isolated.in_child("s3", os._exit, 3)


def test_an_etag_is_the_same_with_and_without_its_quotes() -> None:
    listed = object_store._file("a", "bucket/a", {"size": 1, "ETag": "5d41"})
    looked_up = object_store._file("a", "bucket/a", {"size": 1, "ETag": '"5d41"'})
    assert not listed.is_other(looked_up)
    assert listed.is_other(object_store._file("a", "bucket/a", {"size": 1, "ETag": '"5d42"'}))

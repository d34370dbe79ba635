"""Checkpoints and data in a real object store, through s3fs; run by `make test-s3`.

The server is a process of its own. The proxy before it refuses requests, or cuts their connections.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.object_store.server import KEY, SECRET, serving
from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.locate import find
from shoal.checkpoint.storage.manifest import Entry, Manifest, Piece
from shoal.checkpoint.storage.store import Store
from shoal.cli.checkpoint import main as checkpoint
from tests.rejects import rejects
from tests.services.s3_server import BUSY, FORBIDDEN, Proxy, proxy

ROOT = Path(__file__).parents[2]
SITE = os.environ.get("SHOAL_S3", "")
pytestmark = [
    pytest.mark.skipif(not SITE, reason="needs s3fs and a server: make test-s3"),
    pytest.mark.timeout(300),
]

RECIPE = """
model: {name: llama, preset: tiny, num_layers: 2}
data: {source: python, seq_len: 32, global_batch: 8, validation: 0.0001}
optim: {lr: 1.0e-3, warmup: 2step}
plan: zero=3 fp64
launch: {device: cpu, nproc: 2}
checkpoint: {every: 2step}
run: {name: small, duration: 4step}
"""


class Bucket:
    """An empty bucket behind the proxy, and runs that save to it."""

    def __init__(self, own: type[Proxy], folder: Path, cwd: Path) -> None:
        self.proxy, self.folder, self.cwd = own, folder, cwd
        (cwd / "recipe.yaml").write_text(RECIPE)

    @property
    def variables(self) -> dict[str, str]:
        """What a user exports."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",  # type: ignore[attr-defined]
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",  # the server sends that of all for a part, too
        }

    def start(self, *words: str, **variables: str | None) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(ROOT / "src"), SITE])
        known = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **self.variables, **variables}
        return subprocess.Popen(
            [sys.executable, "-m", "shoal", "train", "recipe.yaml", "--quiet", *words],
            cwd=self.cwd,
            env={name: value for name, value in known.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def train(self, *words: str, code: int = 0, **variables: str | None) -> str:
        """What a run says on stderr, and has to end with a code."""
        process = self.start(*words, **variables)
        out, told = process.communicate(timeout=200)
        assert process.returncode == code, out[-1000:] + told[-4000:]
        return told

    def losses(self, run: str) -> dict[int, float]:
        """The loss of each step of a run."""
        lines = (self.cwd / run / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}

    def steps(self, name: str = "run") -> list[int]:
        """The steps that a person would find in the bucket."""
        return sorted(int(path.parent.name[5:13]) for path in (self.folder / name).glob("step-*/manifest.json"))

    def uploads(self) -> list[str]:
        """The keys of uploads that were not completed."""
        system = fsspec.filesystem("s3")
        found = system.call_s3("list_multipart_uploads", Bucket="bucket", Prefix="").get("Uploads") or []
        return [upload["Key"] for upload in found]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    folder = tmp_path / "server" / "bucket"
    folder.mkdir(parents=True)
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    with serving(Path(SITE) / "bin" / "rclone", folder.parent) as port, proxy(port) as own:
        found = Bucket(own, folder, cwd)
        for name, value in found.variables.items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # of other tests, with their variables
        yield found


def tensors_of(path: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a step, put together from its pieces by plain torch and safetensors."""
    saved = find(path, step)
    files = {name: load_file(saved.path / name) for name in saved.manifest.files}
    found = {}
    for name, entry in saved.manifest.tensors.items():
        first = entry.pieces[0]
        found[name] = torch.empty(entry.shape, dtype=files[first.file][first.key].dtype)
        for piece in entry.pieces:
            there = tuple(slice(begin, begin + size) for begin, size in zip(piece.begin, piece.shape, strict=True))
            found[name][there] = files[piece.file][piece.key]
    return found


def test_a_run_is_saved_and_resumed_on_other_layouts_bit_for_bit(
    bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = [
        ["--run.duration", "4step"],
        ["--run.duration", "6step", "--resume", "latest", "--nproc", "1", "--plan", "fp64"],
        ["--run.duration", "8step", "--resume", "latest", "--nproc", "2", "--plan", "tp=2 fp64"],
    ]
    for words in phases:
        told = bucket.train("--checkpoint.dir", "s3://bucket/run", "--run.dir", "far", *words)
        assert "repeated" not in told
        bucket.train("--run.dir", "near", *words)
    assert bucket.losses("far") == bucket.losses("near")
    assert set(bucket.losses("far")) == set(range(1, 9))
    assert bucket.steps() == [6, 8]
    far, near = tensors_of(bucket.folder / "run", 8), tensors_of(bucket.cwd / "near", 8)
    assert far.keys() == near.keys()
    for name, value in near.items():
        assert torch.equal(far[name], value), name
    assert (bucket.folder / "run" / "latest").read_text() == "step-00000008\n"
    assert checkpoint(["ls", "s3://bucket/run", "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [6, 8]
    assert checkpoint(["verify", "s3://bucket/run", "--all", "--json"]) == 0
    assert checkpoint(["diff", "s3://bucket/run", str(bucket.cwd / "near"), "--json"]) == 0
    assert checkpoint(["diff", "s3://bucket/run/step-00000006", str(bucket.cwd / "near"), "--json"]) == 1


def test_data_is_read_from_a_bucket(bucket: Bucket) -> None:
    source = bucket.folder / "texts"
    source.mkdir()
    for number in range(3):
        rows = [json.dumps({"text": f"{number} {row} of the rows " * 20}) for row in range(40)]
        (source / f"{number}.jsonl").write_text("\n".join(rows))
    words = ["--data.validation", "0"]
    bucket.train("--data.source", "s3://bucket/texts", "--data.cache", "cache", "--run.dir", "far", *words)
    bucket.train("--data.source", str(source), "--run.dir", "near", *words)
    assert bucket.losses("far") == bucket.losses("near")
    fetched = [path for method, path in bucket.proxy.seen if method == "GET" and path.endswith(".jsonl")]
    assert len(fetched) == 3  # by one of the two ranks


def test_data_of_a_bucket_that_does_not_exist(bucket: Bucket) -> None:
    words = ["--data.source", "s3://no-such-bucket/texts", "--data.cache", "cache"]
    told = bucket.train(*words, "--run.dir", "far", code=2)
    assert "D091" in told
    assert "aws s3 mb s3://no-such-bucket" in told


def save(store: Store, step: int, value: torch.Tensor, keep: int = 5) -> None:
    """Save a step as one rank does."""
    store.begin(step)
    try:
        file = shard_file.write(store.draft(step) / "shard-0.safetensors", {"x": value}, store.disk)
        entry = Entry("F32", tuple(value.shape), (Piece("shard-0.safetensors", "x", (0, 0), tuple(value.shape)),))
        store.commit(Manifest(step=step, tensors={"x": entry}, files={"shard-0.safetensors": file}))
    except BaseException:
        store.abandon(step)
        raise
    store.retain(keep)


def loaded(store: Store, step: int) -> torch.Tensor:
    """Load it, every chunk checked."""
    file = store.manifest(step).files["shard-0.safetensors"]
    shape = store.manifest(step).tensors["x"].shape
    with shard_file.Reader(store.path(step) / "shard-0.safetensors", file, disk=store.disk) as reader:
        return reader.rows("x", "F32", shape, 0, shape[0])


@pytest.fixture(scope="module")
def large() -> torch.Tensor:
    """80 MiB: six parts, the header included."""
    return torch.arange(20 * 2**20, dtype=torch.float32).view(-1, 1024)


def test_a_large_shard_is_sent_in_parts_several_at_a_time(bucket: Bucket, large: torch.Tensor) -> None:
    store = Store.at("s3://bucket/run")
    save(store, 1, large)
    parts = [path for method, path in bucket.proxy.seen if method == "PUT" and "partNumber" in path]
    assert len(parts) == 6
    assert bucket.proxy.most_at_once > 1
    assert torch.equal(loaded(store, 1), large)
    assert bucket.uploads() == []
    assert store.take_notes() == []


def test_parts_are_read_straight_into_memory_or_by_the_client(bucket: Bucket, large: torch.Tensor) -> None:
    store = Store.at("s3://bucket/run")
    save(store, 1, large)

    def signed() -> int:
        return sum(method == "GET" and "X-Amz-Signature" in path for method, path in bucket.proxy.seen)

    assert torch.equal(loaded(store, 1), large)
    own = signed()
    assert own >= 5  # 80 MiB by 16, and the header
    assert store.take_notes() == []

    bucket.proxy.rule = staticmethod(  # type: ignore[assignment]
        lambda method, path: "cut" if "X-Amz-Signature" in path and signed() == own + 3 else None
    )
    assert torch.equal(loaded(Store.at("s3://bucket/run"), 1), large)  # one is read again
    bucket.proxy.rule = staticmethod(  # type: ignore[assignment]
        lambda method, path: FORBIDDEN if "X-Amz-Signature" in path else None
    )
    own = signed()
    assert torch.equal(loaded(Store.at("s3://bucket/run"), 1), large)
    assert signed() <= own + 8  # those that were under way when the first was rejected


def test_a_connection_that_is_cut_is_made_again(bucket: Bucket, large: torch.Tensor) -> None:
    cut: list[str] = []

    def rule(method: str, path: str) -> str | None:
        if method == "PUT" and "partNumber" in path and len(cut) < 12:
            cut.append(path)
            return "cut"
        return None

    bucket.proxy.rule = staticmethod(rule)  # type: ignore[assignment]
    store = Store.at("s3://bucket/run")
    save(store, 1, large)
    assert len(cut) == 12
    assert torch.equal(loaded(store, 1), large)
    (note,) = store.take_notes()  # of less than 12: the HTTP client repeats some by itself
    assert re.search(
        r"s3://bucket/run did not answer \d+ requests?, which w.* repeated: .*(Closed|Connection|Server)", note
    )


def test_a_store_that_stays_away_fails_the_save_and_leaves_the_earlier_step(
    bucket: Bucket, large: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.checkpoint.storage.retry.PATIENCE", 1.0)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = Store.at("s3://bucket/run")
    save(store, 1, large)
    sent: list[str] = []

    def rule(method: str, path: str) -> str | None:
        sent.append(path)
        return "cut" if sum("partNumber" in one for one in sent) > 2 else None

    bucket.proxy.rule = staticmethod(rule)  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"Connection|Server"):
        save(store, 2, large + 1)
    bucket.proxy.rule = staticmethod(lambda *_: None)  # type: ignore[assignment]
    assert bucket.uploads() == ["run/step-00000002/shard-0.safetensors"]  # it could not be aborted either
    assert store.steps() == [1]
    save(store, 3, large + 2)
    assert bucket.uploads() == []
    assert store.steps() == [1, 3]
    assert torch.equal(loaded(store, 1), large)
    assert torch.equal(loaded(store, 3), large + 2)


def test_a_step_is_not_removed_because_the_store_does_not_answer(bucket: Bucket) -> None:
    store = Store.at("s3://bucket/run")
    save(store, 1, torch.ones(4, 4))
    bucket.proxy.rule = staticmethod(  # type: ignore[assignment]
        lambda method, path: FORBIDDEN if method == "HEAD" and "manifest.json" in path else None
    )
    with pytest.raises(PermissionError):
        store.begin(2)
    bucket.proxy.rule = staticmethod(lambda *_: None)  # type: ignore[assignment]
    assert store.steps() == [1]
    assert torch.equal(loaded(store, 1), torch.ones(4, 4))


def test_a_run_that_is_killed_in_the_middle_of_a_save_resumes_from_the_step_before(bucket: Bucket) -> None:
    words = ["--run.duration", "6step", "--run.dir"]
    bucket.train(*words, "alone")
    bucket.proxy.rule = staticmethod(  # type: ignore[assignment]
        lambda method, path: "hold" if method == "PUT" and "step-00000004/shard-00001" in path else None
    )
    words = ["--checkpoint.dir", "s3://bucket/run", *words]
    process = bucket.start(*words, "far")
    end = time.monotonic() + 100
    while not any("step-00000004/shard-00001" in path for _, path in bucket.proxy.seen):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert bucket.steps() == [2]
    assert (bucket.folder / "run" / "latest").read_text() == "step-00000002\n"

    bucket.proxy.rule = staticmethod(lambda *_: None)  # type: ignore[assignment]
    bucket.train(*words, "far", "--nproc", "1", "--plan", "fp64", "--checkpoint.keep", "9")
    assert bucket.steps() == [2, 4, 6]
    assert bucket.losses("far") == pytest.approx(bucket.losses("alone"), rel=1e-12)
    names = {path.name for path in (bucket.folder / "run" / "step-00000004").iterdir()}
    left = {name for name in names if not name.startswith(".rclone_temp_")}  # the server's own, of what was cut
    assert left == {"manifest.json", "shard-00000.safetensors"}  # of one rank: nothing of the two before


def test_of_two_runs_in_one_place_the_later_one_goes_on(bucket: Bucket) -> None:
    words = ["--checkpoint.dir", "s3://bucket/run", "--checkpoint.keep", "99", "--run.duration"]
    first = bucket.start(*words, "2000step", "--run.dir", "first")
    end = time.monotonic() + 100
    while not bucket.steps():
        assert first.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    second = bucket.start(*words, "2000step", "--run.dir", "second")
    told = first.communicate(timeout=60)[1]
    second.terminate()
    second.communicate(timeout=60)
    assert first.returncode == 3, told[-3000:]
    assert "C052" in told
    assert "another run saves in s3://bucket/run now" in told
    assert "restart" not in told
    first_steps, second_steps = bucket.losses("first"), bucket.losses("second")
    assert min(second_steps) > 1  # it resumed from a step of the first
    assert max(bucket.steps()) == max(second_steps)
    common = first_steps.keys() & second_steps.keys()
    assert {step: first_steps[step] for step in common} == {step: second_steps[step] for step in common}
    for step in bucket.steps():
        assert tensors_of(bucket.folder / "run", step)


def test_a_store_that_limits_its_rate_is_waited_for_and_reported(bucket: Bucket) -> None:
    began: list[float] = []

    def rule(method: str, path: str) -> Any:
        if "step-00000002/" in path and method == "PUT":
            began.append(time.monotonic())
        return BUSY if began and time.monotonic() - began[0] < 5 else None

    bucket.proxy.rule = staticmethod(rule)  # type: ignore[assignment]
    told = bucket.train("--checkpoint.dir", "s3://bucket/run", "--run.dir", "far", "--run.duration", "6step")
    assert bucket.steps() == [4, 6]
    assert "NOT SAVED" not in told
    assert re.search(r"s3://bucket/run did not answer \d+ requests?, which w.* repeated: SlowDown \d+", told), told
    assert sum(time < began[0] + 5 for time in began) > 1


@pytest.mark.parametrize(
    ("where", "variables", "code", "words"),
    [
        ("s3://no-such-bucket/run", {}, "C050", ["NoSuchBucket", "aws s3 mb s3://no-such-bucket"]),
        ("s3://bucket/run", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "C050", ["SignatureDoesNotMatch", "AWS_SECRET_"]),
        ("s3://bucket/run", {"AWS_ACCESS_KEY_ID": "wrong"}, "C050", ["InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"]),
        ("s3://bucket/run", {"AWS_ACCESS_KEY_ID": None}, "C050", ["credentials", "AWS_PROFILE"]),
        ("s3://bucket/run", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "C050", ["connect", "AWS_ENDPOINT_URL"]),
        ("s3://bucket/run", {"PYTHONPATH": str(ROOT / "src")}, "R027", ["pip install s3fs"]),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_before_the_first_step(
    bucket: Bucket, where: str, variables: dict[str, str | None], code: str, words: list[str]
) -> None:
    told = bucket.train("--checkpoint.dir", where, "--run.dir", "far", "--nproc", "1", code=2, **variables)
    assert code in told
    for word in words:
        assert word in told
    assert "Traceback" not in told
    assert not bucket.losses("far") if (bucket.cwd / "far" / "metrics.jsonl").exists() else True
    assert [path.name for path in bucket.folder.parent.iterdir()] == ["bucket"]  # no bucket is created


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_missing_permission_is_reported_before_the_first_step(bucket: Bucket, method: str) -> None:
    bucket.proxy.rule = staticmethod(lambda asked, _: FORBIDDEN if asked == method else None)  # type: ignore[assignment]
    with rejects("C009", "s3://bucket/run cannot be written to: AccessDenied", "read, write and delete in bucket"):
        Store.at("s3://bucket/run").room(1)


def test_no_bucket_is_created(bucket: Bucket) -> None:
    store = Store.at("s3://no-such-bucket/run")
    with rejects("C009", "NoSuchBucket", "aws s3 mb s3://no-such-bucket"):
        store.room(1)
    with pytest.raises(FileNotFoundError, match="bucket does not exist"):
        save(store, 1, torch.ones(4, 4))
    assert [path.name for path in bucket.folder.parent.iterdir()] == ["bucket"]


LOOP = """
import sys, torch, shoal

with shoal.Run("mb=2", seed=1) as run:
    model = torch.nn.Linear(4, 3)
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
    if sys.argv[1] == "again":
        assert run.load("s3://bucket/loop") == 2
    while run.steps_done < 4:
        run.step(batch)
        if run.steps_done == 2:
            run.save("s3://bucket/loop")
    print(model.weight.tolist())
"""


def test_a_loop_of_a_user_saves_and_loads(bucket: Bucket) -> None:
    (bucket.cwd / "loop.py").write_text(LOOP)
    path = os.pathsep.join([str(ROOT / "src"), SITE])
    said = [
        subprocess.run(
            [sys.executable, "-W", "error", "loop.py", word],
            cwd=bucket.cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True,
        ).stdout
        for word in ("first", "again")
    ]  # fmt: skip
    assert said[0] == said[1]
    assert said[0].startswith("[[")


def test_the_benchmark_runs(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), SITE])
    words = [sys.executable, str(ROOT / "benchmarks" / "object_store" / "run.py"), "--smoke"]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"s3fs put_file, [\d,]+ MB/s \| save, [\d,]+ MB/s \| \d+\.\d\d ", done.stdout), done.stdout

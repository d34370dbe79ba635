"""A run does not resume on data that is not what it was trained on, and says what is different."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.checkpoint.storage.manifest import Manifest
from tests.cli.host import Host, Started
from tests.cli.test_launchers import free_port
from tests.cli.test_train import losses

WORDS = [
    *["train", "--model.num_layers", "1", "--model.hidden", "16", "--model.ffn", "16", "--model.vocabulary", "257"],
    *[
        "--data.seq_len",
        "16",
        "--data.global_batch",
        "4",
        "--data.workers",
        "0",
        "--device",
        "cpu",
        "--launch.threads",
        "1",
    ],
    *["--run.dir", "run", "--checkpoint.every", "0step", "--json"],
]
LONGER = ["--resume", "latest", "--run.duration", "4step"]


def trained(host: Host, folder: Path, *words: str) -> Started:
    ended = host.run(*WORDS, "--run.duration", "2step", *words, cwd=folder)
    assert ended.code == 0, ended.said
    return ended


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"line {number} of the corpus\n" for number in range(500)))
    return path


def test_a_shortened_source_is_rejected_with_both_counts(host: Host, tmp_path: Path, corpus: Path) -> None:
    source = ["--data.source", "corpus.txt"]
    trained(host, tmp_path, *source)
    before = losses(tmp_path / "run")
    whole = corpus.read_bytes()
    corpus.write_bytes(whole[: len(whole) // 2])
    for more in ([], ["--nproc", "2"], ["--dry-run"]):
        ended = host.run(*WORDS, *source, *LONGER, *more, cwd=tmp_path)
        assert ended.code == 2, ended.said
        assert "samples: 704 → 351; held-out samples: 7 → 4; fingerprint: " in " ".join(ended.said.split())
        assert "fix: " in ended.said
        assert "Traceback" not in ended.said
    assert losses(tmp_path / "run") == before
    corpus.write_bytes(whole)  # a new file in its place with what it held is the same data
    ended = host.run(*WORDS, *source, *LONGER, "--nproc", "2", cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert ended.json["resumed_from"] == 2


def test_changed_data_is_accepted_or_started_over_on_request(host: Host, tmp_path: Path) -> None:
    source = ["--data.source", "tokens.bin", "--data.token_dtype", "uint8"]
    tokens = np.arange(5000).astype(np.uint8)
    tokens.tofile(tmp_path / "tokens.bin")
    trained(host, tmp_path, *source)
    tokens[2500] ^= 1  # one token of a file that keeps its size
    tokens.tofile(tmp_path / "tokens.bin")
    ended = host.run(*WORDS, *source, *LONGER, cwd=tmp_path)
    assert ended.code == 2, ended.said
    assert "samples:" not in ended.said
    assert "fingerprint: " in ended.said
    accepted = host.run(*WORDS, *source, *LONGER, "--data.changed", "accept", cwd=tmp_path)
    assert accepted.code == 0, accepted.said
    assert accepted.json["resumed_from"] == 2
    assert "data.changed: accept" in accepted.said
    again = host.run(*WORDS, *source, "--resume", "latest", "--run.duration", "6step", cwd=tmp_path)
    assert again.code == 0, again.said  # what was accepted is what the run is trained on now
    over = host.run(*WORDS, *source, "--resume", "fresh", "--run.duration", "2step", cwd=tmp_path)
    assert (over.code, over.json["resumed_from"]) == (0, None), over.said


def test_steps_that_say_nothing_of_their_data_still_load(host: Host, tmp_path: Path, corpus: Path) -> None:
    source = ["--data.source", "corpus.txt"]
    trained(host, tmp_path, *source)
    (path,) = (tmp_path / "run" / "checkpoints").glob("step-*/manifest.json")
    saved = Manifest.parse(path.read_bytes())
    state = {key: value for key, value in saved.state.items() if key != "data"}
    path.write_bytes(Manifest(step=saved.step, tensors=saved.tensors, files=saved.files, state=state).to_bytes())
    corpus.write_text(corpus.read_text() + "one more line of the corpus\n")
    ended = host.run(*WORDS, *source, *LONGER, cwd=tmp_path)
    assert ended.code == 0, ended.said


def test_another_tokenizer_under_the_same_path_is_rejected(host: Host, tmp_path: Path, corpus: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")

    def write(words: list[str]) -> None:
        known = {word: number for number, word in enumerate(["?", *words])}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="?"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(str(tmp_path / "tokenizer.json"))

    source = ["--data.source", "corpus.txt", "--data.tokenizer", "tokenizer.json"]
    write(["line", "of", "the", "corpus"])
    trained(host, tmp_path, *source)
    write(["of", "line", "the", "corpus"])
    ended = host.run(*WORDS, *source, *LONGER, cwd=tmp_path)
    assert ended.code == 2, ended.said
    assert "fingerprint: " in ended.said


def test_ranks_with_other_data_under_the_same_path_do_not_train_together(host: Host, tmp_path: Path) -> None:
    started, port = [], str(free_port())
    for rank in range(2):
        folder = tmp_path / f"host{rank}"
        folder.mkdir()
        (folder / "corpus.txt").write_text("some text \n" * (500 + rank))
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = [*WORDS, "--data.source", "corpus.txt", "--run.duration", "2step", "--data.global_batch", "4"]
        started.append(host.start(*words, cwd=folder, env=env))
    assert [one.wait() for one in started] == [2, 2]
    said = started[0].said + started[1].said
    assert "rank 1 has other data than rank 0" in said
    assert "fingerprint: " in said
    assert not (tmp_path / "host0" / "run").exists()

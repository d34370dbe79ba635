"""`shoal bench scale --hosts`: rows on the ranks of two hosts (namespaces of the kernel) beside those of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.host import Host
from tests.cli.test_hosts import hosts  # noqa: F401  # a fixture

SETTINGS = """
    --model.num_layers 1 --model.hidden 32 --model.ffn 48 --data.seq_len 32 --data.global_batch 4 --data.validation 0
    --device cpu --launch.threads 1 --plan fp64 --plans zero=3 --mode strong --steps 2 --rounds 1 --json
"""


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_ranks_of_two_hosts(host: Host, hosts: list[tuple[str, str]], tmp_path: Path) -> None:  # noqa: F811
    cases = " ".join(f"{address}) name={name};;" for name, address in hosts)
    ssh = tmp_path / "enter"
    ssh.write_text(f'#!/bin/sh\nhost=$1; shift\ncase $host in {cases} esac\nexec ip netns exec $name "$@"\n')
    ssh.chmod(0o700)
    (first, here), (_, there) = hosts
    words = ["bench", "scale", *SETTINGS.split(), "--cluster", "h100:1x2"]
    words += ["--hosts", f"{here}:1,{there}:1", "--ssh", f"{ssh} {{host}}"]
    done = host.start(*words, cwd=tmp_path, network=first)
    assert done.wait(150) == 0, done.said
    rows = {(row["plan"], row["ranks"]): row for row in done.json["rows"]}
    assert done.json["hosts"] == [1, 1]
    row = rows["zero=3", 2]
    assert row["reason"] is None, row
    assert row["step_seconds"]["median"] > 0
    assert row["efficiency"]["median"] > 0
    assert row["predicted"]["seconds"] > 0
    (losses,) = done.json["losses"]
    assert losses["are_equal"]
    assert losses["largest"] < 1e-9
    assert len(losses["differences"]) == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--hosts", "localhost:1"], "N125"),
        (["--ssh", "ssh {host}"], "N067"),
        (["--hosts", "localhost:0,b:1"], "N050"),
        (["--hosts", "localhost:1,192.0.2.9:1", "--ssh", "false {host}"], "N054"),
    ],
)
def test_mistakes(host: Host, tmp_path: Path, words: list[str], code: str) -> None:
    done = host.run("bench", "scale", *SETTINGS.split(), *words, cwd=tmp_path)
    assert done.code == 2, done.said
    assert code in done.said

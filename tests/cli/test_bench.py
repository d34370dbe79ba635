"""`shoal bench comm`: a short one on two ranks, on two hosts, and what a person can get wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shoal.cli import main
from shoal.predict.cluster_parser import cluster_from_yaml
from tests.cli.host import Host
from tests.cli.test_train import SHOAL

ROOT = Path(__file__).parents[2]
SIZES = ["1KB", "16KB", "64KB", "1MB", "4MB"]
HELD = 64 * 1024
"""Of these, the one that is held out."""


def load_hosts() -> Any:
    """The harness of the benchmarks, which are no package."""
    spec = importlib.util.spec_from_file_location("bench_hosts", ROOT / "benchmarks" / "comm" / "hosts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


harness = load_hosts()


@pytest.fixture(scope="module")
def found(host: Host, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run, and the folder with its files."""
    for seconds in ("6", "40"):  # a starved machine has time for few cells only
        folder = tmp_path_factory.mktemp("bench")
        words = ["--nproc", "2", "--node", "1", "--seconds", seconds, "--cluster", "cpu:2", "--sizes", *SIZES]
        words += ["--out", "c.yaml", "--plot", "p.svg", "--html", "p.html", "--draw", "--json"]
        ended = host.run("bench", "comm", *words, cwd=folder)
        assert ended.code == 0, ended.said
        assert ended.json["seconds"] < float(seconds) + 10
        if len(ended.json["skipped"]) < len(ended.json["timings"]):
            break
    return ended.json, folder


def test_every_collective_by_every_algorithm_at_every_size(found: tuple[dict[str, Any], Path]) -> None:
    said, _ = found
    cells = {(each["kind"], each["algorithm"], each["bytes"]) for each in said["timings"]}
    kinds = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"}
    algorithms = {"naive", "ring", "tree", "double_tree", "halving", "hierarchical", "builtin"}
    sizes = {2**10, 2**14, 2**16, 2**20, 2**22}
    missing = {(each["kind"], each["algorithm"], each["size"]) for each in said["skipped"]}
    wanted = {(kind, algorithm, size) for kind in kinds for algorithm in algorithms for size in sizes}
    assert cells | missing >= wanted
    assert len(missing) < len(wanted) / 2
    assert {each["tier"] for each in said["timings"]} == {"within"}


def test_what_was_sent_is_what_the_list_says(found: tuple[dict[str, Any], Path]) -> None:
    counted = [each for each in found[0]["timings"] if each["sent_bytes_counted"] is not None]
    assert len(counted) > 50
    assert all(each["sent_bytes_counted"] == each["sent_bytes_expected"] > 0 for each in counted)


def test_numbers_hold_together(found: tuple[dict[str, Any], Path]) -> None:
    """What tests can say of time on a machine that others use, too."""
    said, _ = found
    for each in said["timings"]:
        assert each["bandwidth"] == pytest.approx(each["bytes"] / each["seconds"])
    fastest = [(each["kind"], each["bytes"]) for each in said["timings"] if each["best"]]
    assert sorted(fastest) == sorted(
        {(each["kind"], each["bytes"]) for each in said["timings"] if each["kind"] != "send"}
    )
    sizes: dict[tuple[str, str], set[int]] = {}
    for each in said["timings"]:
        sizes.setdefault((each["kind"], each["algorithm"]), set()).add(each["bytes"])
    is_held = any(HELD in measured and len(measured) > 2 for measured in sizes.values())  # a slow machine skips sizes
    assert {held["bytes"] for each in said["fits"] for held in each["validation"]} == ({HELD} if is_held else set())
    # That the median error is 0.05 on a machine of its own, the benchmark says.
    assert not is_held or said["validation"]["median"] < 3
    assert 0 < said["link_bandwidth"]["within"]["together"] < 1e12
    assert "ring all_reduce, 2 ranks" in "\n".join(said["pictures"])


def test_the_planner_reads_what_was_written(
    found: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said, folder = found
    file = folder / "c.yaml"
    cluster = cluster_from_yaml(file)
    assert cluster.to_mapping() == said["cluster"]
    assert (cluster.per_node, cluster.nodes) == (2, 1)
    assert "measured" in cluster.inside.source
    assert 1e6 < cluster.inside.bandwidth < 1e12
    assert main(["plan", "llama3-8b", "--cluster", str(file), "--json"]) in (0, 1)  # 1: nothing fits
    assert json.loads(capsys.readouterr().out)


def test_the_plot_is_a_picture(found: tuple[dict[str, Any], Path]) -> None:
    drawn = ElementTree.parse(found[1] / "p.svg").getroot()
    texts = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert "all_reduce within hosts" in texts
    assert "builtin" in texts


def test_the_page_draws_every_message(found: tuple[dict[str, Any], Path]) -> None:
    page = (found[1] / "p.html").read_text()
    assert "all-reduce within hosts" in page
    assert "ring all_reduce: messages of 2 ranks in 2 rounds" in page
    assert "https:" not in page


# ---- two hosts ------------------------------------------------------------------------------------------------------


PREFIX = f"shoal-bench-test-{os.getpid()}"


@pytest.fixture
def two_hosts() -> Iterator[list[Any]]:
    if harness.missing():
        pytest.skip(harness.missing())
    try:
        with harness.made(2, rate="200mbit", prefix=PREFIX, network="10.79.0") as hosts:
            yield hosts
    except OSError as error:
        pytest.skip(f"needs the right to make network namespaces: {error}")


@pytest.mark.wide
def test_two_hosts_are_two_tiers(two_hosts: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "c.yaml"
    words = ["--kinds", "all_reduce", "--algorithms", "ring", "hierarchical", "builtin", "--sizes", "1KB", "1MB", "4MB"]
    command = [*SHOAL, "bench", "comm", *words, "--seconds", "5", "--json", "--out", str(out), "--cluster", "cpu:4"]
    ended = harness.checked(harness.run(two_hosts, list(map(str, command)), per_host=2, timeout=60))
    assert [each.stdout for each in ended[1:]] == [""] * 3
    said = json.loads(ended[0].stdout)
    assert said["hosts"] == 2
    shaped = 1.3 * 200e6 / 8  # a bucket that was full lets a little more through
    assert said["link_bandwidth"]["across"]["together"] < shaped < said["link_bandwidth"]["within"]["together"]
    assert {each["algorithm"] for each in said["timings"] if each["tier"] == "across"} >= {"ring", "hierarchical"}
    assert not any(each["algorithm"] == "hierarchical" for each in said["timings"] if each["tier"] == "within")
    cluster = cluster_from_yaml(out)
    assert (cluster.per_node, cluster.nodes) == (2, 2)
    assert cluster.between.bandwidth < shaped < cluster.inside.bandwidth


KILLED = """
import importlib.util, os, signal, subprocess, sys
spec = importlib.util.spec_from_file_location("hosts", sys.argv[1])
hosts = sys.modules["hosts"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hosts)
with hosts.made(1, prefix=sys.argv[2]) as (host,):
    left = subprocess.Popen(["ip", "netns", "exec", host.name, "sleep", "60"], stdout=-3, stderr=-3)
    print(host.name, left.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_hosts_that_a_killed_run_has_left_are_removed(two_hosts: list[Any]) -> None:
    """And those of another run that lives are not."""
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, harness.__file__, PREFIX], capture_output=True, text=True, check=False
    )
    name, pid = killed.stdout.split()
    assert {name, two_hosts[0].name} <= set(harness._namespaces())
    harness._remove_orphans(PREFIX)  # as `made` does first
    assert name not in harness._namespaces()
    assert two_hosts[0].name in harness._namespaces()
    assert not Path(f"/proc/{pid}/exe").exists()


def test_one_command_runs_on_every_host(two_hosts: list[Any]) -> None:
    ended = harness.run(two_hosts, [sys.executable, "-c", "import os; print(os.environ['RANK'])"], per_host=2)
    assert [each.stdout.strip() for each in ended] == ["0", "1", "2", "3"]
    failed = harness.run(two_hosts, [sys.executable, "-c", "import sys; sys.exit('no')"])
    assert [each.code for each in failed] == [1, 1]
    with pytest.raises(RuntimeError, match=f"rank 0 on {two_hosts[0].name} ended with 1:\nno"):
        harness.checked(failed)


# ---- what a person can get wrong ------------------------------------------------------------------------------------

WRONG = {
    "no such benchmark": ("com", "unknown benchmark 'com'", "shoal bench comm"),
    "no such algorithm": ("comm --algorithms rong", "unknown algorithm 'rong'", "ring"),
    "no such collective": ("comm --kinds all_redcue", "unknown collective 'all_redcue'", "all_reduce"),
    "no size": ("comm --sizes many", "got 'many'", "1KB..256MB"),
    "no unit": ("comm --sizes 1XB", "got '1XB'", "64KB, or 1KB..256MB"),
    "two points": ("comm --sizes 1.2.3KB", "got '1.2.3KB'", "64KB, or 1KB..256MB"),
    "more than there is": ("comm --sizes 1e999KB", "got '1e999KB'", "64KB, or 1KB..256MB"),
    "no sizes": ("comm --sizes", "--sizes has no value", "--sizes 1KB..256MB"),
    "no collectives": ("comm --kinds", "--kinds has no value", "--kinds all_reduce"),
    "no algorithms": ("comm --algorithms", "--algorithms has no value", "--algorithms naive ring"),
    "one size": ("comm --sizes 4MB", "--sizes must be at least two", "--sizes 1KB 4MB"),
    "one short size": ("comm --sizes 1KB", "--sizes must be at least two", "--sizes 1KB 4MB"),
    "hierarchical on one host": (
        "comm --algorithms hierarchical",
        "hierarchical needs several nodes, got 4 ranks on one host",
        "--node 2",
    ),
    "hierarchical among others": (
        "comm --nproc 3 --algorithms ring hierarchical",
        "got 3 ranks on one host",
        "--node 1",
    ),
    "sizes the wrong way round": (
        "comm --sizes 1MB..1KB",
        "the smaller one first, got '1MB..1KB'",
        "--sizes 1KB..256MB",
    ),
    "one rank": ("comm --nproc 1", "--nproc must be 2 or more, got 1", "--nproc 2"),
    "nodes that do not divide": ("comm --nproc 4 --node 3", "--node must divide 4 ranks, got 3", "1, 2 or 4"),
    "no time": ("comm --seconds 0", "--seconds must be above 0, got 0.0", "--seconds 80"),
    "no folder": ("comm --out nowhere/c.yaml", "nowhere/c.yaml cannot be written", "existing folder"),
    "not YAML": ("comm --out c.json", "must end in .yaml, got c.json", "c.yaml"),
    "links without builtin": ("comm --algorithms ring --out c.yaml", "must include builtin for --out", "ring builtin"),
    "nccl by lists": ("comm --backend nccl", "must be builtin with --backend nccl", "--algorithms builtin"),
    "no such option": ("comm --nprocs 4", "unknown option --nprocs", "--nproc"),
    "no such cluster": ("comm --cluster h1000", "no preset of a device 'h1000'", "h100"),
}


@pytest.mark.parametrize(("words", "what", "fix"), WRONG.values(), ids=WRONG)
def test_mistakes_are_told_before_anything_starts(
    words: str, what: str, fix: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words.split()]) == 2
    told = capsys.readouterr().err
    assert what in told
    assert fix in told.partition(what)[2]
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_a_launcher_are_not_started_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x"}
    for name, value in {**place, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "comm", "--nproc", "8"]) == 2
    assert "--nproc must be the 4 ranks of torchrun, got 8" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    for words in (["bench"], ["bench", "comm", "--help"], ["bench", "comm", "--kinds", "x"]):
        code = f"import sys; from shoal.cli import main; main({words}); assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

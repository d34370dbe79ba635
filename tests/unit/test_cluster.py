"""Machines on paper: presets, files, and what a group of ranks sees of the links."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.predict.cluster import Cluster
from shoal.predict.cluster_parser import here_file, parse_cluster
from shoal.predict.presets.clusters import DEVICES, TIERS, preset_device
from shoal.predict.presets.peak_flops import peak_flops
from tests.rejects import rejects


def test_a_preset_says_nodes_and_devices() -> None:
    cluster = parse_cluster("h100:8x16")
    assert (cluster.per_node, cluster.nodes, cluster.num_devices) == (8, 16, 128)
    assert cluster.device.peak["bf16"] == peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    assert parse_cluster("h200:4").nodes == 1
    assert parse_cluster("a100-80").per_node == 8


@pytest.mark.parametrize("name", DEVICES)
def test_every_preset_is_whole_and_says_where_it_is_from(name: str) -> None:
    device, entry = preset_device(name), DEVICES[name]
    assert device.source
    assert entry.inside in TIERS
    assert entry.between in TIERS
    assert all(0 < device.achievable[word] <= device.peak[word] for word in device.peak)
    assert device.rate("bf16") > 0, "where there is no bf16, something else computes it"


@pytest.mark.parametrize(
    "name", ["v100", "a100-40", "a100-80", "h100", "h100-pcie", "h100-nvl", "h200", "b200", "gb200"]
)
def test_devices_that_people_have_are_there(name: str) -> None:
    assert parse_cluster(f"{name}:8").device.memory > 30e9


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("h10:8", "no preset of a device 'h10'", "h100:8"),
        ("h100:eight", "'eight' is not a number of devices", "h100:8 for one node"),
        ("h100:0", "'0' is not a number of devices", "h100:8x16"),
        ("nowhere.yaml", "nowhere.yaml cannot be read", "shoal calibrate writes one"),
    ],
)
def test_a_mistake_is_one_message_with_the_fix(text: str, what: str, fix: str) -> None:
    with pytest.raises(ShoalError) as caught:
        parse_cluster(text)
    assert what in str(caught.value)
    assert fix in str(caught.value)


def test_a_file_reads_back_what_was_written(tmp_path: Path) -> None:
    cluster = replace(parse_cluster("mi300x:8x2"), is_measured=True, price=2.5)
    path = tmp_path / "here.yaml"
    path.write_text(cluster.to_yaml())
    assert parse_cluster(str(path)) == cluster


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_here_is_what_was_measured(home: Path) -> None:
    cluster = replace(parse_cluster("mi300x:8"), is_measured=True)
    here_file().parent.mkdir(parents=True)
    here_file().write_text(cluster.to_yaml())
    assert here_file().is_relative_to(home)
    assert parse_cluster("here") == cluster
    assert parse_cluster("here:4") == replace(cluster, per_node=4)
    assert parse_cluster("here:4x2") == replace(cluster, per_node=4, nodes=2)
    with rejects("Q016", "'many'"):
        parse_cluster("here:many")


def test_here_that_was_not_measured_says_how(home: Path) -> None:
    with pytest.raises(ShoalError) as caught:
        parse_cluster("here:2")
    assert f"no calibration of this machine found: {here_file()} does not exist" in str(caught.value)
    assert "fix: shoal calibrate" in str(caught.value)


def test_a_file_with_a_mistyped_key_names_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(parse_cluster("h100:8").to_yaml().replace("streaming:", "streaming_:"))
    with pytest.raises(ShoalError) as caught:
        parse_cluster(str(path))
    assert str(caught.value) == "device has no key 'streaming_' [Q020]\n    fix: streaming"


def written(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "ours.yaml"
    path.write_text(text)
    return parse_cluster(str(path))


def test_a_file_may_be_like_a_preset_but_for_what_it_says(tmp_path: Path) -> None:
    ours = written(
        tmp_path,
        "like: h100:8x4\nnodes: 2\nprice: 2\nbetween: ethernet-100\n"
        "inside: {bandwidth: 25e9}\ndevice: {peak: {bf16: 9.0e14}}\n",
    )
    preset = parse_cluster("h100:8x4")
    assert (ours.per_node, ours.nodes, ours.price) == (8, 2, 2)
    assert ours.between == TIERS["ethernet-100"]
    assert ours.inside == replace(preset.inside, bandwidth=25e9)
    assert ours.device == replace(preset.device, peak={**preset.device.peak, "bf16": 9e14})


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("like: ours.yaml", "Q014", ("'ours.yaml'",)),
        ("like: h1000:8", "Q014", ("'h1000'",)),
        ("like: h100:8\nbetween: ethernet", "Q020", ("'ethernet'",)),
        ("like: h100:8\nper_node: eight", "Q020", ("per_node", "'eight'", "whole number")),
        ("like: h100:8\nper_node: 7.5", "Q020", ("per_node", "7.5", "whole number")),
        ("like: h100:8\ninside: {bandwidth: -1}", "Q020", ("inside: bandwidth", "-1")),
        ("like: h100:8\ninside: {bandwidthh: 1e9}", "Q020", ("inside", "'bandwidthh'")),
        ("like: h100:8\nprice: .nan", "Q020", ("price", "nan")),
    ],
)
def test_a_mistake_in_a_file_is_rejected(tmp_path: Path, text: str, code: str, values: tuple[str, ...]) -> None:
    with rejects(code, *values):
        written(tmp_path, text)


def test_a_file_without_links_says_so(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text("per_node: 8\n")
    with rejects("Q020", match="does not say its device"):
        parse_cluster(str(path))


def test_a_group_inside_a_node_never_sees_the_network() -> None:
    cluster = parse_cluster("h100:8x4")
    assert cluster.link(8, 1).bandwidth == cluster.inside.bandwidth
    assert cluster.link(4, 2).nodes == 1


def test_a_group_of_one_member_per_node_has_one_share_of_the_network() -> None:
    cluster = parse_cluster("h100:8x4")
    alone, whole = cluster.link(4, 8), cluster.link(32, 1)
    assert (alone.nodes, whole.nodes) == (4, 4)
    assert alone.bandwidth == cluster.between.bandwidth
    assert whole.bandwidth == min(cluster.inside.bandwidth, 8 * cluster.between.bandwidth)


def test_ring_and_tree() -> None:
    link = parse_cluster("h100:8").link(8, 1)
    large, small = 1e9, 1e3
    ring = link.base + 14 * link.latency + 2 * 7 / 8 * large / link.bandwidth
    assert link.reduce(large) == pytest.approx(ring)
    assert link.reduce(small) < link.base + 14 * link.latency, "a tree is faster for short messages"
    assert link.gather(large) == pytest.approx(link.base + 7 * link.latency + 7 / 8 * large / link.bandwidth)
    assert parse_cluster("h100:8").link(1, 1).reduce(large) == 0


def test_gathers_may_be_slower_than_sums() -> None:
    cluster = parse_cluster("h100:8")
    slow = replace(cluster, inside=replace(cluster.inside, gathering=0.5)).link(8, 1)
    fast, size = cluster.link(8, 1), 1e9
    assert slow.gather(size) - slow.gather(0) == pytest.approx(2 * (fast.gather(size) - fast.gather(0)))
    assert slow.reduce(size) == fast.reduce(size)


def test_as_many_machines_as_are_needed() -> None:
    cluster = parse_cluster("h100:8x4")
    assert cluster.resized(16).nodes == 2
    assert cluster.resized(4).per_node == 4
    with rejects("Q017", "of 8"):
        cluster.resized(12)


NO_HOME = """
import os, pwd
import shoal.predict.presets.clusters
from shoal.errors import ShoalError
from shoal.predict.cluster_parser import parse_cluster
os.environ.pop("HOME", None)
os.setgroups([]); os.setgid(54321); os.setuid(54321)  # after the imports: Python may be in the home of root
try:
    parse_cluster("here")
except ShoalError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_user_without_a_home() -> None:
    ended = subprocess.run([sys.executable, "-c", NO_HOME], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "cluster='h100:8'" in ended.stdout

"""From readings to a cluster by arithmetic with a known answer, and a short real measurement of this machine's CPU."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from shoal.bench.calibrate import CalibrationBench, calibrate
from shoal.bench.fit_cluster import (
    Reading,
    Readings,
    cluster_of,
    device_of,
    error_of_messages,
    error_of_products,
    fit_rate,
    fit_tier,
)
from shoal.cli import calibrate as verb
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.predict.cluster import Link
from shoal.predict.cluster_parser import cluster_from_yaml, parse_cluster
from tests.rejects import rejects

RATE, BANDWIDTH = 400e12, 2e12
TIER = {"base": 20e-6, "latency": 5e-6, "bandwidth": 100e9}


def product(rows: int, columns: int, inner: int, *, rate: float = RATE, precision: str = "bf16") -> Reading:
    """One that takes exactly what the planner's formula says."""
    flops, traffic = 2.0 * rows * columns * inner, 2.0 * (rows * inner + inner * columns + rows * columns)
    seconds = flops / rate + traffic / BANDWIDTH
    size = (rows, columns, inner)
    return Reading(what="product", size=size, precision=precision, seconds=seconds, flops=flops, traffic=traffic)


def messages(num_ranks: int) -> list[Reading]:
    """Those that a link of known numbers would carry."""
    link = Link(num_ranks, 1, TIER["bandwidth"], TIER["latency"], TIER["base"])
    kinds = {"send": link.send, "all_gather": link.gather, "reduce_scatter": link.gather, "all_reduce": link.reduce}
    return [
        Reading(what=what, size=(size,), precision="fp32", seconds=seconds(size), traffic=size)
        for size in (2**16, 2**23, 2**28)
        for what, seconds in kinds.items()
    ]


def made_up(num_ranks: int = 1) -> Readings:
    work = [
        *(product(rows, 4096, 4096) for rows in (128, 1024, 8192)),
        product(8192, 8192, 8192, rate=RATE / 10, precision="fp32"),
        Reading(what="attention", size=(2048, 128), precision="bf16", seconds=1e-3, flops=2e11),
        Reading(what="attention", size=(8192, 128), precision="bf16", seconds=1e-2, flops=3e12),
        Reading(what="copy", size=(2**30,), precision="fp32", seconds=1.0, traffic=2.5e12),
        Reading(what="elementwise", size=(2**29,), precision="bf16", seconds=1.0, traffic=BANDWIDTH),
        Reading(what="launch", size=(16, 64), precision="bf16", seconds=1.8e-3),
        Reading(what="block", size=(8192, 4096), precision="bf16", seconds=1e-2, flops=1e12),
    ]
    return Readings(
        readings=tuple(work + (messages(num_ranks) if num_ranks > 1 else [])),
        device="NVIDIA H200",
        kind="cuda",
        num_ranks=num_ranks,
        num_threads=8,
        memory=150e9,
        context=1e9,
        host="somewhere",
        torch="2.11.0",
        date="2026-11-15",
        took=60.0,
    )


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def test_the_rate_is_found_again() -> None:
    products = [product(rows, 4096, inner) for rows in (128, 1024, 8192) for inner in (1024, 4096)]
    assert fit_rate(products, BANDWIDTH) == pytest.approx(RATE)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_link_is_found_again(num_ranks: int) -> None:
    tier = fit_tier(messages(num_ranks), num_ranks)
    within = 1e-6 if num_ranks == 2 else 0.1  # with more ranks an all-reduce is a ring or a tree, and no sum of the two
    assert tier.bandwidth == pytest.approx(TIER["bandwidth"], rel=within)
    assert tier.base + tier.latency == pytest.approx(TIER["base"] + TIER["latency"], rel=within)


def test_gathers_that_are_slower_are_found_again() -> None:
    slow = [each for each in messages(2) if each.what in ("all_gather", "reduce_scatter")]
    per_byte = 0.5 / TIER["bandwidth"]  # of two ranks each sends the half
    slower = [replace(each, seconds=each.seconds + per_byte * each.size[0]) for each in slow]
    tier = fit_tier([each for each in messages(2) if each not in slow] + slower, 2)
    assert tier.gathering == pytest.approx(0.5)
    assert tier.bandwidth == pytest.approx(TIER["bandwidth"])
    assert fit_tier(messages(2), 2).gathering == pytest.approx(1)


def test_no_part_of_a_link_is_negative() -> None:
    shrinking = [replace(each, seconds=1.0 / (1 + number)) for number, each in enumerate(messages(2))]
    tier = fit_tier(shrinking, 2)
    assert tier.base >= 0
    assert tier.latency >= 0
    assert 0 < tier.bandwidth < float("inf")


def test_a_link_on_which_bytes_take_no_time_is_as_fast_as_its_fastest_message() -> None:
    flat = [replace(each, seconds=0.001) for each in messages(2)]
    largest = max(each.size[0] for each in flat if each.what in ("send", "all_reduce"))
    tier = fit_tier(flat, 2)
    assert tier.bandwidth == pytest.approx(largest / 0.001)
    assert 0.1 < tier.gathering < 10


def test_a_device_is_what_was_measured() -> None:
    device = device_of(made_up())
    assert device.achievable["bf16"] == pytest.approx(RATE)
    assert device.achievable["fp32"] == pytest.approx(RATE / 10)
    assert device.peak["bf16"] == 989e12  # the datasheet's
    assert device.bandwidth == 2.5e12
    assert device.streaming == pytest.approx(0.8)
    assert device.attention == {"bf16": 3e14}  # the longer one
    assert device.host_factor == pytest.approx(2.0)  # 1.8 ms where the usual server takes 0.9
    assert (device.memory, device.context) == (150e9, 1e9)
    assert device.is_modern  # by its name


def test_a_device_that_nobody_knows_has_its_fastest_product_as_its_peak() -> None:
    found = replace(made_up(), device="CPU of the future", kind="cpu")
    assert device_of(found).peak["bf16"] == max(each.rate for each in found.of("product", "bf16"))


def test_a_cluster_says_what_was_not_measured() -> None:
    alone, four = cluster_of(made_up()), cluster_of(made_up(4))
    assert (alone.per_node, four.per_node) == (1, 4)
    assert alone.is_measured
    assert alone.inside.name == "nvlink4"
    assert alone.inside.source.startswith("not measured")
    assert four.inside.source == "measured between 4 ranks"
    assert four.between.name == "infiniband-ndr"
    assert four.between.source.startswith("not measured")
    assert "torch 2.11.0" in alone.source
    assert "NVIDIA H200" in alone.source
    assert alone.date == "2026-11-15"


def test_errors_are_those_of_the_fit() -> None:
    found = made_up(2)
    cluster = cluster_of(found)
    assert error_of_products(found, cluster.device, "bf16") == pytest.approx(0, abs=1e-9)
    assert error_of_messages(found, cluster.inside) == pytest.approx(0, abs=1e-6)
    slower = replace(found, readings=tuple(replace(each, seconds=2 * each.seconds) for each in found.readings))
    assert error_of_products(slower, cluster.device, "bf16") == pytest.approx(0.5)
    assert error_of_messages(slower, cluster.inside) == pytest.approx(0.5)


def test_the_file_is_read_back(tmp_path: Path) -> None:
    found = made_up(2)
    path = tmp_path / "here.yaml"
    path.write_text(verb.file_text(found, cluster_of(found)))
    assert cluster_from_yaml(path) == cluster_of(found)
    assert parse_cluster(str(path)) == cluster_of(found)
    assert "# product        8192 x 8192 x 8192   fp32" in path.read_text()


def test_tables_show_every_reading() -> None:
    found = made_up(2)
    cluster = cluster_of(found)
    console = Console(width=140)
    with console.capture() as drawn:
        for table in (
            verb.products_table(found, cluster),
            verb.messages_table(found),
            verb.other_table(found, cluster),
        ):
            console.print(table)
    text = drawn.get()
    for word in (
        "8192 x 8192 x 8192",
        "TFLOP/s",
        "400.0",
        "8,192 tokens",
        "2.5 TB/s",
        "1.80 ms",
        "256 MiB",
        "100 GB/s",
    ):
        assert word in text, word
    assert "0.0%" in text  # of the fit


# ---- this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.alone
def test_two_ranks_measure_this_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    assert verb.main(["--nproc", "2", "--device", "cpu", "--seconds", "1", "--out", str(path), "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["file"] == str(path)
    cluster = cluster_from_yaml(path)
    assert said["cluster"] == cluster.to_mapping()
    assert (cluster.per_node, cluster.nodes, cluster.is_measured) == (2, 1, True)
    kinds = {each["what"] for each in said["measured"]["readings"]}
    assert kinds == {
        *("product", "attention", "copy", "elementwise", "launch", "block"),
        *("send", "all_gather", "reduce_scatter", "all_reduce"),
    }
    assert said["measured"]["torch"] == torch.__version__
    sizes = {each["size"][0] for each in said["measured"]["readings"] if each["what"] == "all_reduce"}
    assert len(sizes) == 3
    assert set(cluster.device.attention) == {"fp32", "fp64"}
    alone = rate_of_one_thread()
    assert alone / 5 < cluster.device.rate("fp32") < 5 * alone  # another moment of a machine that may be busy
    assert 1e7 < cluster.inside.bandwidth < 1e11
    assert 0 < cluster.device.context < cluster.device.memory


def rate_of_one_thread() -> float:
    """FLOP/s of a product on one core, since the two ranks had one each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    x, y = torch.randn(2, 512, 512)
    x @ y
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        x @ y
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 2 * 512**3 / min(seconds)


@pytest.mark.alone
@pytest.mark.parametrize("milliseconds", [1, 20])
def test_a_reading_is_the_time_of_one(milliseconds: int) -> None:
    with World.start(None, device="cpu") as world:
        bench = CalibrationBench(world, seconds=10.0, progress=Progress(disable=True))
        reading = bench.take("copy", (1,), "fp32", lambda: time.sleep(milliseconds / 1e3), traffic=7.0)
    assert bench.readings == [reading]
    assert milliseconds <= reading.seconds * 1e3 < 1.5 * milliseconds
    assert reading.rate == 7.0 / reading.seconds


@pytest.mark.wide
def test_it_takes_as_long_as_it_may() -> None:
    """Products that are slow, as 16-bit ones on a CPU, are not taken more often than there is time for."""
    found = calibrate(nproc=2, device="cpu", seconds=8, quiet=True)
    assert found.took <= 2 * 8  # 1.3 on an idle machine; it was 2.7


@pytest.mark.alone
def test_work_that_takes_longer_than_there_is_time_for_is_measured_once() -> None:
    calls: list[float] = []
    with World.start(None, device="cpu") as world:
        bench = CalibrationBench(world, seconds=0.1, progress=Progress(disable=True))
        for _ in range(3):
            bench.take("copy", (1,), "fp32", lambda: (calls.append(0.0), time.sleep(0.05)), traffic=7.0)
    assert len(calls) == 2 * 3  # to warm up, and to be timed


def test_who_asks_for_less_than_it_needs_is_told_what_it_took() -> None:
    assert verb._why_longer(10.0, 8.0) == ""
    assert "--seconds 3 is too short for this machine" in verb._why_longer(6.2, 3.0)


def test_one_rank_has_no_link_to_measure() -> None:
    found = calibrate(nproc=1, device="cpu", seconds=0.5, quiet=True)
    assert found.num_ranks == 1
    assert not found.of_messages()
    assert cluster_of(found).inside.source.startswith("not measured")
    assert not torch.distributed.is_initialized()


# ---- what people get wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--nproc 0", "--nproc must be 1 or more, got 0"),
        ("--seconds 0", "--seconds must be above 0, got 0.0"),
        ("--seconds nan", "--seconds must be above 0, got nan"),
        ("--out nowhere/cluster.yaml", "nowhere/cluster.yaml cannot be written"),
        ("--out .", ". cannot be written"),
        ("--out cluster.txt", "must end in .yaml, got cluster.txt"),
        ("--ranks 2", "unknown option --ranks"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    words: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shoal.bench.calibrate.calibrate", lambda **_: pytest.fail("it measured"))
    with pytest.raises(ShoalError) as caught:
        verb.main(words.split())
    assert any(what in problem.what and problem.fix for problem in caught.value.problems)
    assert not list(tmp_path.iterdir())


def test_a_gpu_without_room_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")

    monkeypatch.setattr("shoal.bench.calibrate.measure", fail)
    with rejects("N023", match=r"too little memory.*\n.*fix: stop other programs"):
        calibrate(nproc=1)


def test_one_of_many_ranks_does_not_start_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with rejects("R033", "got 2"):
        verb.main([])


def test_by_default_it_is_kept_where_here_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("shoal.bench.calibrate.calibrate", lambda **_: made_up())
    assert verb.main([]) == 0
    assert verb.here_file() == tmp_path / ".config" / "shoal" / "here.yaml"
    assert cluster_from_yaml(verb.here_file()) == cluster_of(made_up())

"""The part of its time that a cluster with faults trains: simulated, and held against what is known in closed form."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest

import shoal
from shoal.cli import main
from shoal.predict.goodput.advise import changes
from shoal.predict.goodput.recovery import Recovery, best_interval, restart_seconds
from shoal.predict.goodput.simulate import simulate
from tests.rejects import rejects

HOUR = 3600.0
PLAIN = Recovery(
    hosts=64,
    per_host=8,
    mtbf=1000 * HOUR,
    stall=5.0,
    write=0.0,
    read=0.0,
    interval=300.0,
    restart=120.0,
    lost_hosts=0.0,
)


@pytest.mark.parametrize("interval", [60.0, 300.0, 1800.0])
@pytest.mark.parametrize("hosts", [4, 64, 256])
def test_where_all_hosts_come_back_it_is_the_closed_form(interval: float, hosts: int) -> None:
    """A cycle from fault to fault: whole intervals count, and a recovery begins again with every fault in it."""
    one = replace(PLAIN, hosts=hosts, interval=interval)
    rate, pause = 1 / one.between_faults, one.detection + one.restart
    expected = rate * interval / (math.expm1(rate * (interval + one.stall)) * math.exp(rate * pause))
    assert simulate(one, duration=5000 * one.between_faults).ettr == pytest.approx(expected, rel=0.03, abs=0.005)


@pytest.mark.parametrize("spares", [0, 2])
def test_the_causes_add_up(spares: int) -> None:
    one = replace(PLAIN, lost_hosts=0.5, spares=spares, write=40.0, read=20.0)
    found = simulate(one)
    assert found.useful + sum(found.lost.values()) == pytest.approx(found.wall)
    assert min(found.lost.values()) >= 0.0
    assert simulate(one).useful == found.useful
    assert simulate(one, seed=1).ettr == pytest.approx(found.ettr, abs=0.02)


def test_hosts_that_are_away_slow_the_others_down() -> None:
    """Faults × repair hosts are away on average, unless spares stand in for them."""
    one = replace(PLAIN, mtbf=20_000 * HOUR, stall=0.0, restart=0.0, detection=0.0, lost_hosts=1.0, repair=12 * HOUR)
    away = 8 * 12 / 20_000  # of each host
    assert simulate(one).parts()["fewer hosts"] == pytest.approx(away / (1 + away), rel=0.1)
    assert simulate(replace(one, spares=6)).parts()["fewer hosts"] < 0.1 * away


def test_every_means_helps() -> None:
    one = replace(PLAIN, lost_hosts=0.25, write=200.0, read=200.0)
    now = simulate(one)
    found = changes(one, now)
    assert [change.goodput.ettr for change in found] == sorted((c.goodput.ettr for c in found), reverse=True)
    told = " ".join(change.what for change in found)
    for word in ("host memory", "another host", "spare", "half of the time"):
        assert word in told
    kept = replace(one, has_memory_tier=True)
    assert simulate(kept).lost["computed again"] < now.lost["computed again"]
    alone = replace(one, hosts=1, per_host=64, lost_hosts=1.0)  # whose memory is lost with it
    assert simulate(replace(alone, has_memory_tier=True)).useful == simulate(alone).useful


def test_a_run_that_never_fails_needs_nothing() -> None:
    one = replace(PLAIN, mtbf=1e9 * HOUR, interval=best_interval(5.0, 1e9 * HOUR / 512))
    now = simulate(one)
    assert now.ettr > 0.999
    assert changes(one, now) == []


def test_young_is_near_the_best() -> None:
    by_young = best_interval(PLAIN.stall, PLAIN.between_faults)
    ettr = [simulate(replace(PLAIN, interval=f * by_young)).ettr for f in (0.4, 1.0, 2.5)]
    assert max(ettr) == ettr[1]


def test_a_hundred_thousand_devices_in_less_than_a_second() -> None:
    began = time.process_time()
    one = replace(PLAIN, hosts=12_500, mtbf=50_000 * HOUR, restart=restart_seconds(100_000), lost_hosts=0.25)
    assert 0.3 < simulate(one).ettr < 0.7  # a fault every 30 minutes, and a restart takes 15
    assert time.process_time() - began < 1.0


WORDS = ["plan", "llama3-8b", "--cluster", "h100:8x8", "--seq-len", "8192", "--global-batch", "64"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--mtbf", "50000h", "--tokens", "1T", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    faults = told["faults"]
    assert faults["between_faults_s"] == round(50_000 * HOUR / 64)
    assert faults["ettr"] + sum(faults["lost"].values()) == pytest.approx(1.0, abs=1e-3)
    assert faults["is_restart_assumed"]
    assert main([*WORDS, "--tokens", "1T", "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["run"]["days"] == pytest.approx(told["run"]["days"] * faults["ettr"], rel=1e-3)
    assert "faults" not in without
    assert main([*WORDS, "--mtbf", "50h", "--restart", "30sec", "--spares", "2"]) == 0
    out = capsys.readouterr().out
    assert "faults: one in 46.9 min" in out
    assert "a restart takes 30.0 s (given)" in out
    assert "what would help" in out


def test_times_that_are_none() -> None:
    with rejects("Q030", "100step"):
        shoal.plan("llama3-8b", cluster="h100:8", mtbf="100step")
    with rejects("Q030", -1):
        shoal.plan("llama3-8b", cluster="h100:8", mtbf="500h", spares=-1)

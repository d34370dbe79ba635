"""Another coordinator takes over when the record of the leader has not changed for long enough, while etcd answers."""

from __future__ import annotations

import pytest

from shoal.launch.hosts.etcd import leadership
from shoal.launch.hosts.etcd.leadership import ANSWERING, MOST_PAUSE, Watch
from shoal.launch.hosts.lease import LEASE, TAKEOVER

CASES = {
    "the leader lives": ([(0, 1), (0.5, 2), (3, 3), (3.5, 4), (6, 5)], []),
    "the leader is lost": ([(each / 4, 1) for each in range(20)], [each / 4 for each in range(14, 20)]),
    "etcd elects a leader, and then the leader of the run changes its beat": (
        [(0, 1), (3, 1), (3.25, 1), (3.5, 1), (3.75, 2), (4.5, 2)],
        [],
    ),
    "etcd elects a leader, and that of the run is lost": (
        [(0, 1), (3, 1), (3.25, 1), (3.5, 1), (3.75, 1), (4.25, 1), (4.5, 1)],
        [4.25, 4.5],
    ),
    "this coordinator was asleep": ([(0, 1), (60, 1), (60.25, 2), (61, 2), (62, 2), (63, 2), (63.75, 2)], [63.75]),
    "each answer comes after a pause": ([(1.5 * each, 1) for each in range(10)], []),
}


@pytest.mark.parametrize("what", CASES)
def test_when_a_leader_counts_as_lost(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readings, expected = CASES[what]
    assert (TAKEOVER, ANSWERING, MOST_PAUSE) == (3.25, 1.0, 1.0)  # else the cases have to change
    watch, over = Watch(), []
    for moment, beat in readings:
        monkeypatch.setattr(leadership, "boottime", lambda now=moment: 1000 + now)
        watch.note((7, beat))
        over += [moment] if watch.is_over else []
    assert over == expected


def test_workers_end_before_another_coordinator_takes_over() -> None:
    assert LEASE + 0.4 < TAKEOVER  # an agent looks five times a second

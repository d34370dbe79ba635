"""What the page of a run says of its communication is what the run itself has summed up, whatever axes are combined."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.pages.run.read_run import read_run
from shoal.pages.run.time_parts import hidden_by_axis, whole_run
from tests.cli.host import Host
from tests.cli.test_resume import WORDS


@pytest.mark.parametrize(
    ("plan", "axes"),
    [("zero=3 cp=2", {"dp_shard_cp", "cp"}), ("zero=0 cp=2", {"dp_cp", "cp"}), ("dp_replicate=2", {"dp_replicate"})],
)
def test_the_page_has_the_communication_of_every_axis(host: Host, tmp_path: Path, plan: str, axes: set[str]) -> None:
    words = [*WORDS, "--nproc", "2", "--plan", plan, "--run.duration", "24step", "--run.dir", "run", "--json"]
    ended = host.run(*words, "--checkpoint.every", "0step", cwd=tmp_path)
    assert ended.code == 0, ended.said
    summed = ended.json["comm_axes"]
    assert set(summed) == axes
    metrics = read_run(tmp_path / "run").metrics
    assert set(hidden_by_axis(metrics)) == axes
    parts = whole_run(metrics)
    assert parts is not None
    assert parts.comm is not None
    exposed = sum(each["fraction"] * (1 - each["overlap_fraction"]) for each in summed.values())
    assert parts.comm == pytest.approx(min(exposed, 1 - parts.data), rel=0.25)
    assert parts.data + parts.comm + parts.other == pytest.approx(1)

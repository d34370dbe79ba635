"""α and β of each algorithm: recovered where they are known, and checked at validation sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.bench.links import with_links
from shoal.bench.plot import Panel, svg
from shoal.bench.timings import (
    BUILTIN,
    FLOAT,
    SEND,
    TOGETHER,
    Timing,
    best,
    fit,
    fits,
    in_doubt,
    link_bandwidth,
    list_of,
    validation_sizes,
)
from shoal.blueprint.collectives.algorithms import ALGORITHMS, KINDS, Kind
from shoal.predict.cluster import Cluster
from shoal.predict.cluster_parser import cluster_from_yaml, parse_cluster

ALPHA, BETA = 200e-6, 1 / 1.5e9
SIZES = tuple(1024 * 4**power for power in range(10))


def timing(size: int, *, kind: Kind = "all_reduce", algorithm: str = "ring", ranks: int = 4) -> Timing:
    """One that takes exactly what its list says."""
    listed = list_of(kind, algorithm, ranks, size, node=2)
    seconds = listed.seconds(latency=ALPHA, bandwidth=1 / BETA, bytes_per_element=FLOAT)
    rounds, elements = listed.critical()
    return Timing(
        tier="within", kind=kind, algorithm=algorithm, ranks=ranks, size=size, seconds=seconds, rounds=rounds,
        critical=elements * FLOAT,
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, BUILTIN])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_list_costs_gives_its_two_numbers_back(kind: Kind, algorithm: str) -> None:
    """The list's own `seconds` made these: so the fit is by the same formula."""
    found = fit([timing(size, kind=kind, algorithm=algorithm) for size in SIZES], validation_sizes(SIZES))
    assert found.alpha == pytest.approx(ALPHA, rel=1e-6)
    assert found.beta == pytest.approx(BETA, rel=1e-6)
    assert found.worst_error < 1e-6
    assert [held.size for held in found.validation] == [16 * 1024, 2**20, 64 * 2**20]


def test_a_size_that_was_disturbed_does_not_decide() -> None:
    timings = [timing(size) for size in SIZES]
    timings[4] = replace(timings[4], seconds=3 * timings[4].seconds)
    found = fit(timings, validation_sizes(SIZES))
    assert found.worst_error < 0.05


def test_no_size_is_far_off_where_the_truth_is_bent() -> None:
    """Long messages go a quarter faster than the latency and bandwidth of short ones say."""
    timings = [timing(size) for size in SIZES]
    bent = [replace(each, seconds=each.seconds / (1.25 if each.size > 2**25 else 1.0)) for each in timings]
    assert fit(bent, validation_sizes(SIZES)).worst_error < 0.15


def test_what_a_fit_does_not_explain_is_in_doubt_and_so_are_its_neighbours() -> None:
    timings = [timing(size) for size in SIZES]
    assert in_doubt(SIZES, fit(timings, validation_sizes(SIZES))) == set()
    timings[5] = replace(timings[5], seconds=1.3 * timings[5].seconds)
    assert in_doubt(SIZES, fit(timings, validation_sizes(SIZES))) == set(SIZES[4:7])
    assert in_doubt(SIZES[:6], fit(timings[:6], validation_sizes(SIZES))) == set(SIZES[4:6])


def test_held_out_sizes_are_not_fitted_to() -> None:
    timings = [timing(size) for size in SIZES]
    wrong = [
        replace(each, seconds=2 * each.seconds) if each.size in validation_sizes(SIZES) else each for each in timings
    ]
    found = fit(wrong, validation_sizes(SIZES))
    assert found.alpha == pytest.approx(ALPHA, rel=1e-6)
    assert [held.error for held in found.validation] == pytest.approx([-0.5] * 3)


def test_numbers_are_never_negative() -> None:
    """Twice the bytes in half the time: bytes cost nothing then."""
    short, long = timing(1024), replace(timing(4 * 2**20), seconds=timing(1024).seconds / 2)
    assert min(fit([short, long], ()).alpha, fit([short, long], ()).beta) >= 0


def test_the_fastest_and_the_wire() -> None:
    ring, tree = timing(2**20), timing(2**20, algorithm="tree")
    ring = replace(ring, seconds=tree.seconds / 2)
    send = replace(ring, kind=SEND, algorithm=TOGETHER, seconds=1e-3)
    assert best([ring, tree, send]) == {ring}
    assert link_bandwidth([ring, tree, send], "within") == pytest.approx(2**20 / 1e-3)
    assert ring.bus_bandwidth == pytest.approx(1.5 * ring.bandwidth)


def test_each_collective_and_algorithm_has_a_fit() -> None:
    timings = [timing(size, algorithm=algorithm) for size in SIZES for algorithm in ("ring", "tree")]
    assert [(each.kind, each.algorithm) for each in fits(timings)] == [("all_reduce", "ring"), ("all_reduce", "tree")]


def test_one_size_is_no_fit() -> None:
    """Of one size, α alone explains everything, and the wire would be infinitely fast."""
    alone = [timing(2**20, algorithm="tree")]
    both = [timing(size) for size in (2**10, 2**20)]
    assert [each.algorithm for each in fits([*both, *alone])] == ["ring"]
    assert fit(both, without=[2**20]).beta == pytest.approx(BETA, rel=1e-3)
    known = parse_cluster("cpu:4")
    measured = with_links(known, [replace(alone[0], algorithm=BUILTIN)], per_host=4, num_hosts=1, source="", date="")
    assert measured.inside == known.inside


# ---- links for the planner ------------------------------------------------------------------------------------------


def of_link(cluster: Cluster, tier: str) -> list[Timing]:
    """What torch's own collectives would take by the planner's formula."""
    link = cluster.link(cluster.num_devices if tier == "across" else cluster.per_node, 1)
    formulas = {SEND: link.send, "all_reduce": link.reduce, "all_gather": link.gather, "reduce_scatter": link.gather}
    return [
        Timing(
            tier=tier,
            kind=kind,
            algorithm=TOGETHER if kind == SEND else BUILTIN,
            ranks=link.degree,
            size=size,
            seconds=seconds(size),
            rounds=1,
            critical=size,
        )
        for size in SIZES
        for kind, seconds in formulas.items()
    ]


def test_links_within_and_across_hosts_are_found_again(tmp_path: Path) -> None:
    cpu = parse_cluster("cpu:2x2")
    inside = replace(cpu.inside, bandwidth=2e9, latency=300e-6, base=100e-6, gathering=0.8)
    between = replace(cpu.between, bandwidth=1e8, latency=400e-6, base=900e-6, gathering=0.9)
    true = replace(cpu, inside=inside, between=between)
    timings = of_link(true, "within") + of_link(true, "across")
    found = with_links(cpu, timings, per_host=2, num_hosts=2, source="a test", date="")
    for fitted, known in ((found.inside, inside), (found.between, between)):
        assert fitted.bandwidth == pytest.approx(known.bandwidth, rel=0.1)
        assert fitted.gathering == pytest.approx(known.gathering, rel=0.1)
        assert fitted.base + fitted.latency == pytest.approx(known.base + known.latency, rel=0.25)
        assert "measured" in fitted.source
    for degree in (2, 4):
        mine, theirs = found.link(degree, 1), true.link(degree, 1)
        assert mine.gather(1024) == pytest.approx(theirs.gather(1024), rel=0.1)
        assert mine.reduce(2**26) == pytest.approx(theirs.reduce(2**26), rel=0.1)
    file = tmp_path / "cluster.yaml"
    file.write_text(found.to_yaml())
    assert cluster_from_yaml(file) == found


def test_a_tier_that_was_not_measured_stays() -> None:
    cpu = parse_cluster("cpu:2")
    found = with_links(cpu, of_link(cpu, "within"), per_host=2, num_hosts=1, source="a test", date="")
    assert found.between == cpu.between
    assert found.inside != cpu.inside


# ---- the plot -------------------------------------------------------------------------------------------------------


def test_a_plot_is_xml_with_a_dot_for_each_point() -> None:
    lines = {"ring": [(1e3, 1e6), (1e6, 1e9)], "a < b": [(1e3, 2e6)]}
    panel = Panel(title="all_reduce", lines=lines, curves={"ring": lines["ring"]}, level=2e9, level_name="wire")
    drawn = ElementTree.fromstring(svg([panel], title="&", x_name=str, y_name=str))
    dots = [each for each in drawn.iter() if each.tag.endswith("circle")]
    assert len(dots) == 3 + 2  # and two in the legend
    assert len([each for each in drawn.iter() if each.tag.endswith("polyline")]) == 1

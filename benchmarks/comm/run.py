"""Are shoal's collectives as fast as torch's, do they use the full link, and do their lists predict slow links?

python benchmarks/comm/run.py [--parts same wire nodes bench] [--rounds 15]

same    4 ranks of this machine, 64 MB of float32: our all-reduce and gloo's own, in turns
wire    two hosts with 1 Gbit/s between them: bytes that a rank sends in a second, against the shaped rate
nodes   2 x 2 ranks with 100 Mbit/s between the pairs: hierarchical against a flat ring, measured and by their lists
bench   `shoal bench comm --json` with its defaults: how long it takes, and its errors at validation sizes

Hosts are network namespaces (`hosts.py`), which need root.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.blueprint.collectives import steps
from shoal.blueprint.collectives.algorithms import Algorithm
from shoal.comm.message_collectives import MessageCollectives
from shoal.comm.rendezvous.launcher_environment import Placement, read_environment
from shoal.comm.world import World
from shoal.launch.local import launch

sys.path.insert(0, str(Path(__file__).parent))
import hosts

MB = 2**20
GLOO = "gloo's own"
DATA = 0.957
"""Of a packet of 1,514 bytes, what TCP carries: 1,448."""
Times = dict[str, list[float]]


def in_turns(
    placement: Placement | None,
    store: dist.Store | None,
    algorithms: list[str],
    size: int,
    rounds: int,
    node: int | None,
) -> tuple[Times, dict[str, int]]:
    """Seconds of an all-reduce by each algorithm, on the slowest rank, round after round; and bytes that this rank has
    sent for one."""
    with World.start(placement, device="cpu", store=store, threads=1) as world:
        x = torch.empty(size // 4).fill_(0.0)
        group = world.control_group
        ours = {
            a: MessageCollectives(group, a, node=node if a == "hierarchical" else None) for a in algorithms if a != GLOO
        }  # type: ignore[arg-type]
        times: Times = {algorithm: [] for algorithm in algorithms}
        for number in range(rounds + 1):
            order = algorithms if number % 2 else algorithms[::-1]
            for algorithm in order:
                world.barrier()
                start = time.perf_counter()
                dist.all_reduce(x) if algorithm == GLOO else ours[algorithm].all_reduce(x)
                seconds = world.all_reduce_host([time.perf_counter() - start], "max").wait()[0]
                if number:  # the first one connects
                    times[algorithm].append(seconds)
        return times, {algorithm: over.counted.bytes // (rounds + 1) for algorithm, over in ours.items()}


def as_rank(algorithms: list[str], size: int, rounds: int, node: int | None) -> None:
    """One rank of one host: what it measured, as JSON."""
    print(json.dumps(in_turns(read_environment(os.environ), None, algorithms, size, rounds, node)))


def on_hosts(
    algorithms: list[str], *, rate: str, per_host: int, size: int, rounds: int, node: int | None
) -> tuple[Times, dict[str, int]]:
    words = [*algorithms, "--size", size, "--rounds", rounds, *(["--node", node] if node else [])]
    command = [sys.executable, str(Path(__file__)), "--rank", *map(str, words)]
    with hosts.made(2, rate=rate) as both:
        ended = hosts.checked(hosts.run(both, command, per_host=per_host, timeout=600))
    times, sent = json.loads(ended[0].stdout.splitlines()[-1])
    return times, sent


# ---- the parts ------------------------------------------------------------------------------------------------------


def same(rounds: int, size: int = 64 * MB) -> str:
    """Part (a) of the bar."""
    watch = Watch()
    algorithms = ["ring", "halving", "double_tree", GLOO]
    times, _ = launch(in_turns, (algorithms, size, rounds, None), nproc=4)[0]
    theirs = statistics.median(times[GLOO])
    rows = [
        {
            "algorithm": name,
            "median, measured": f"{statistics.median(found) * 1e3:.1f} ms",
            "fastest, measured": f"{min(found) * 1e3:.1f} ms",
            "bandwidth": f"{size / statistics.median(found) / 1e9:.2f} GB/s",
            "speed against gloo's": f"{theirs / statistics.median(found):.3f}",
        }
        for name, found in times.items()
    ]
    best = max(theirs / statistics.median(found) for name, found in times.items() if name != GLOO)
    said = f"Our best is **{best:.2f}** of gloo's speed; the bar is 0.95. {rounds} rounds in turns. {watch}."
    return f"## 4 ranks of this machine, 64 MB\n\n{table(rows)}\n\n{said}\n"


def wire(rounds: int) -> str:
    """Part (b)."""
    watch = Watch()
    size, rate = 64 * MB, "1gbit"
    times, sent = on_hosts(["ring", GLOO], rate=rate, per_host=1, size=size, rounds=min(rounds, 8), node=None)
    sent[GLOO] = sent["ring"]  # an all-reduce of two ranks cannot send less
    of_wire = {
        name: sent[name] / statistics.median(found) / hosts.bytes_per_second(rate) for name, found in times.items()
    }
    rows = [
        {
            "algorithm": name,
            "sent by a rank, counted": f"{sent[name]:,} bytes" if name != GLOO else "–",
            "median, measured": f"{statistics.median(found) * 1e3:.1f} ms",
            "of the wire": f"{of_wire[name]:.3f}",
        }
        for name, found in times.items()
    ]
    said = (
        f"The ring fills **{of_wire['ring']:.3f}** of {rate}; the bar is 0.92. Headers of TCP, IP and Ethernet leave"
        f" {DATA} of it for data. {watch}."
    )
    return f"## Two hosts, {rate} between them, 64 MB\n\n{table(rows)}\n\n{said}\n"


def nodes(rounds: int) -> str:
    """Part (c)."""
    watch = Watch()
    size, rate = 16 * MB, "100mbit"
    algorithms = ["ring", "hierarchical"]
    times, _ = on_hosts(algorithms, rate=rate, per_host=2, size=size, rounds=min(rounds, 5), node=2)
    measured = {name: statistics.median(found) for name, found in times.items()}
    predicted = {name: by_its_list(name, size, hosts.bytes_per_second(rate)) for name in algorithms}
    rows = [
        {
            "algorithm": name,
            "predicted by its list": f"{predicted[name]:.3f} s",
            "median, measured": f"{measured[name]:.3f} s",
            "off by": f"{predicted[name] / measured[name] - 1:+.1%}",
        }
        for name in algorithms
    ]
    factors = [of["ring"] / of["hierarchical"] for of in (predicted, measured)]
    said = (
        f"Hierarchical is faster by **{factors[1]:.2f}**, measured; {factors[0]:.2f} by the lists, off by"
        f" {factors[0] / factors[1] - 1:+.1%}; the bar is 15 %. {watch}."
    )
    return f"## 2 x 2 ranks, {rate} between the pairs, 16 MB\n\n{table(rows)}\n\n{said}\n"


def by_its_list(algorithm: str, size: int, between: float) -> float:
    """Seconds on 2 x 2 ranks, when a cable carries each direction on its own, and what stays inside of a host takes the
    time of a copy or two."""
    chosen: Algorithm = algorithm  # type: ignore[assignment]

    def link(source: int, target: int) -> tuple[float, float]:
        return (1e-3, 1e9) if source // 2 == target // 2 else (1e-3, between * DATA)

    def cable(source: int, target: int) -> tuple[object, ...]:
        return ("inside", source, target) if source // 2 == target // 2 else ("cable", source // 2)

    return steps("all_reduce", chosen, 4, size // 4, node=2).seconds_over(link, wire=cable)


def bench() -> str:
    """Bar 6."""
    watch = Watch()
    began = time.perf_counter()
    command = [sys.executable, "-m", "shoal", "bench", "comm", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    found = json.loads(ended.stdout)
    rows = [row_of_fit(each) for each in found["fits"]]
    held = found["validation"]
    said = (
        f"`shoal bench comm --json` took **{seconds:.0f} s**; the bar is 90 s. At {held['number']} sizes that were held"
        f" out, α and β are off by **{held['median']:.1%}** in the median and {held['worst']:.0%} at worst, and"
        f" {held['within_15_percent']:.0%} of them within 15 %. {watch}."
    )
    return f"## shoal bench comm\n\n{said}\n\n{table(rows)}\n"


def row_of_fit(each: dict[str, Any]) -> dict[str, str]:
    return {
        "collective": each["kind"],
        "algorithm": each["algorithm"],
        "α, fitted": f"{each['alpha'] * 1e6:.0f} µs",
        "1 / β, fitted": f"{1e-9 / each['beta']:.2f} GB/s" if each["beta"] else "–",
        "error at sizes held out": ", ".join(
            f"{h['bytes'] // 1024:,} KB {h['error']:+.1%}" for h in each["validation"]
        ),
    }


class Watch:
    """What else the cores did since it was made."""

    def __init__(self) -> None:
        self.began, self.busy, self.own = time.perf_counter(), busy_seconds(), own_seconds()

    def __str__(self) -> str:
        cores = (time.perf_counter() - self.began) * len(os.sched_getaffinity(0))
        others = max(0.0, busy_seconds() - self.busy - (own_seconds() - self.own)) / cores
        return f"Others, and interrupts, had {others:.0%} of the cores meanwhile"


def busy_seconds() -> float:
    """Of all cores: user, nice, system, interrupts."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()
    return sum(int(words[place]) for place in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Of this process, and of those that it has started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["same", "wire", "nodes", "bench"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    options = arguments(parser, parts=["same"], rounds=1)
    if options.rank:
        as_rank(options.rank, options.size, options.rounds, options.node)
        return
    if hosts.missing() and {"wire", "nodes"} & set(options.parts):
        parser.error(hosts.missing())
    size = 4096 if options.smoke else 64 * MB
    made = {"same": functools.partial(same, size=size), "wire": wire, "nodes": nodes}
    texts = [bench() if part == "bench" else made[part](options.rounds) for part in options.parts]
    question = "Are our collectives as fast as torch's, do they fill a wire, and do their lists say what they cost?"
    text = "\n".join([heading("Collectives", question), *texts])
    print(text)
    theme = "comm-bench" if options.parts == ["bench"] else "comm"
    print(f"written to {write(theme, text)}")


if __name__ == "__main__":
    main()

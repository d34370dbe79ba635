"""The example of fault tolerance runs as a person would start it, and its losses are those of an undisturbed run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.examples.host import run_for_real
from tests.readme.fork_host import Ran


def on_one_host() -> Ran:
    return run_for_real("11_fault_tolerance.py", "--one-host", timeout=110)


def on_two_hosts() -> Ran:
    return run_for_real("11_fault_tolerance.py", timeout=230)


def test_a_killed_rank_changes_no_loss(once: Callable[..., Any]) -> None:
    """Exit code 0 says that the losses are the same bits."""
    ran = once(on_one_host)
    assert ran.code == 0, ran.stderr[-3000:]
    killed, after, plain = ran.stdout.splitlines()
    assert killed.startswith("rank 1 of 2 was killed by signal 9 (SIGKILL)")
    numbers = re.findall(r"\d+\.\d{4}\b", after)
    assert len(numbers) == 3
    assert numbers == re.findall(r"\d+\.\d{4}\b", plain)


@pytest.mark.wide
@pytest.mark.timeout(240)
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and the program ip")
def test_a_lost_host_changes_no_loss(once: Callable[..., Any]) -> None:
    ran = once(on_two_hosts)
    assert ran.code == 0, ran.stderr[-3000:]
    *_, lost, continuing, _ = ran.stdout.splitlines()
    assert "host shoal-d (rank 1) is lost" in lost
    assert "continuing on 1 of 2 hosts" in continuing

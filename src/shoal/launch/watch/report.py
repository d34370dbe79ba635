"""A verdict in words, with its code and its fix."""

from __future__ import annotations

from shoal.errors import Problem
from shoal.launch.watch.verdict import Verdict


def problem_of(verdict: Verdict, *, num_ranks: int, timeout: float) -> Problem:
    """Put a verdict into words."""
    rank = f"rank {verdict.rank} of {num_ranks}"
    waiting = _ranks(verdict.waiting)
    seconds = f"{verdict.waited:.1f} s"
    at = f" in {verdict.call}" if verdict.call else ""
    where = "" if verdict.phase == "step" else f" (phase: {verdict.phase})"
    waits = f"{waiting} {'has' if len(verdict.waiting) == 1 else 'have'} waited {seconds}"
    longer = f"--launch.timeout {2 * timeout:g}, if the rank is slow and not stuck"
    match verdict.kind:
        case "stopped":
            what = f"{rank} was stopped by a signal (SIGSTOP) for {seconds}, while {waiting} waited{at}"
            return Problem("N025", what, "gdb -p PID, in place of kill -STOP, to look at a process")
        case "never_entered":
            what = f"{rank} never entered {verdict.call}; {waits}{where}"
            return Problem("N030", what, "make the same collective calls on every rank; the stack shows where it is")
        case "gil":
            what = f"{rank} holds the GIL, so that no other Python thread of it runs; {waits}{at}{where}"
            return Problem(
                "N031", what, "release the GIL in the extension that the stack shows, or call it in a process"
            )
        case "kernel":
            what = f"{rank} is blocked in the kernel{_in_brackets(verdict.wchan)}; {waits}{at}{where}"
            return Problem("N032", what, f"check the disk or network file system that the stack shows; {longer}")
        case "mismatch":
            what = f"{rank} called {_own(verdict)} as {_number(verdict)}; {_others(verdict)}"
            return Problem(
                "N033", what, "make the same call, with the same shape and dtype, on every rank of the group"
            )
        case "alone":
            also = f" (as did {_ranks(verdict.waiting[1:])})" if verdict.waiting[1:] else ""
            others = [(ranks, call) for ranks, call in verdict.versions if verdict.rank not in ranks]
            missing = tuple(sorted(rank for ranks, _ in others for rank in ranks))
            elsewhere = "; ".join(f"{_ranks(ranks)} wait{'s' * (len(ranks) == 1)} in {call}" for ranks, call in others)
            entered = f"{rank} entered {verdict.call}{also}, which {_ranks(missing)} never entered"
            what = f"{entered}; for {seconds}, {elsewhere}"
            return Problem("N040", what, "make the call on every rank, not under `if rank == 0:`; the stack shows it")
        case "order":
            calls = "; ".join(f"{_ranks(ranks)} in {call}" for ranks, call in verdict.versions)
            what = f"{rank} and others have waited for each other for {seconds}: {calls}"
            fix = "call the collectives of different groups in the same order on every rank"
            if any(" of dp_replicate" in call for _, call in verdict.versions):
                fix += "; or, if the loss of a rank leaves parameters out, --run.find_unused_parameters true"
            return Problem("N034", what, fix)
        case "network":
            what = f"{rank} and all others have entered {verdict.call}, which has not ended for {seconds}"
            return Problem("N035", what, f"check the network between the hosts, and GLOO_SOCKET_IFNAME; {longer}")


def _own(verdict: Verdict) -> str:
    return verdict.versions[-1][1]


def _others(verdict: Verdict) -> str:
    return "; ".join(f"{_ranks(ranks)} called {call}" for ranks, call in verdict.versions[:-1])


def _number(verdict: Verdict) -> str:
    assert verdict.call is not None
    return f"#{verdict.call.number} of {verdict.call.axis}"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _ranks(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' * (len(ranks) != 1)} {listed}{', ...' if len(ranks) > 8 else ''}"

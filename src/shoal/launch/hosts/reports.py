"""Errors and failures as plain values that a message can carry, and back."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Any

from shoal.errors import Problem, RunFailed, ShoalError
from shoal.launch.failure import Failure

MOST_TEXT = 20_000
"""Characters of a text in a report; of a longer traceback the end is kept."""
MOST_REPORT = 2**17
"""Bytes of a report. A packet of a Unix socket has at most 208 KiB, unless a host is configured otherwise."""


def plain_error(error: ShoalError) -> dict[str, Any]:
    """The problems of an error."""
    problems = [[each.code, each.what[:MOST_TEXT], each.fix[:MOST_TEXT]] for each in error.problems[:50]]
    return {
        "title": error.title,
        "problems": problems,
        "has_failed": isinstance(error, RunFailed),
        "may_pass": isinstance(error, RunFailed) and error.may_pass,
    }


def error_from(report: dict[str, Any], *, host: str = "") -> ShoalError:
    """The error of a report; `host`: where it was raised, if that matters."""
    problems = [Problem(*map(str, each)) for each in report["problems"]]
    if host:
        problems = [each.within(f"host {host}") for each in problems]
    if not report["has_failed"]:
        return ShoalError(*problems, title=str(report["title"]))
    failed = RunFailed(*problems, title=str(report["title"]))
    failed.may_pass = bool(report["may_pass"])
    return failed


def error_of(failure: Failure, *, place: str) -> RunFailed:
    """The error of a failure that no rank has raised as one of ours; `place`: the rank and its host, in words."""
    text = failure.what
    if failure.code != "N057":
        text = f"{place} {text}" if failure.is_sudden else f"{place} failed: {text}"
        text = f"{text}\n{failure.details}" if failure.details else text
    error = RunFailed(text, fix=failure.fix, code=failure.code)
    error.may_pass = failure.may_pass
    error.memory = {"rank": failure.rank, **failure.memory} if failure.lacks_memory else {}
    return error


def encoded(message: dict[str, Any]) -> bytes:
    """A report as one packet. One that is too long loses the calls of the ranks, and then its texts are cut in the
    middle; all problems stay."""
    data = json.dumps(message).encode()
    if len(data) > MOST_REPORT and "left" in message:
        message = {name: value for name, value in message.items() if name != "left"}
        data = json.dumps(message).encode()
    for most in (4000, 1000, 200):
        if len(data) <= MOST_REPORT:
            break
        about = {name: _cut(message[name], most) for name in ("failure", "error") if name in message}
        data = json.dumps({**message, **about}).encode()
    return data


def _cut(value: Any, most: int) -> Any:
    """Shorten the texts of a value to `most` characters."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[: most // 2]} [...] {value[-most // 2 :]}"
    if isinstance(value, dict):
        return {name: _cut(each, most) for name, each in value.items()}
    return [_cut(each, most) for each in value] if isinstance(value, list) else value


def plain_failure(failure: Failure, *, first_rank: int) -> dict[str, Any]:
    """A failure with the rank among all ranks and its age. Clocks of two hosts cannot be compared; ages can."""
    failure = replace(failure, rank=failure.rank + first_rank, details=failure.details[-MOST_TEXT:])
    failure = replace(failure, what=failure.what[:MOST_TEXT])
    return {**asdict(failure), "at": time.monotonic() - failure.at}


def failure_from(report: dict[str, Any]) -> Failure:
    """The failure of a report that has just arrived, with its time on this host's clock."""
    return Failure(**{**report, "at": time.monotonic() - float(report["at"])})

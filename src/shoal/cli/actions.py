"""Verbs with actions, such as `shoal launch slurm`: pick the action, or list all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.errors import ShoalError, nearest


def pick(verb: str, arguments: Sequence[str], about: Mapping[str, str], kind: str = "action") -> str | None:
    """The action that comes first; None after help was printed. An unknown one is rejected with the nearest."""
    action = arguments[0] if arguments else "--help"
    if action in ("-h", "--help"):
        print(_help(verb, about, kind), end="")
        return None
    if action not in about:
        near = nearest(action, about)
        raise ShoalError(f"unknown {kind} {action!r}", fix=f"shoal {verb} {near or ' | '.join(about)}", code="R001")
    return action


def _help(verb: str, about: Mapping[str, str], kind: str) -> str:
    width = max(map(len, about))
    lines = [f"  {name:<{width}}  {text}" for name, text in about.items()]
    usage = f"usage: shoal {verb} {kind.upper()} [options]"
    end = f"`shoal {verb} {kind.upper()} --help` lists the options; all take --json."
    return "\n".join([usage, "", *lines, "", end, ""])

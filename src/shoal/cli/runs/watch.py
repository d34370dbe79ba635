"""`shoal watch [RUN]`: the page of a run live in a browser, or in the terminal."""

from __future__ import annotations

import getpass
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shoal.cli.options import parse_options
from shoal.cli.process import signals_as_exceptions
from shoal.pages.live.server import WatchServer
from shoal.pages.run.find_runs import newest_run
from shoal.pages.run.read_run import is_run

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Show a run while it trains: the page of `shoal report`, live in a browser of this machine, or --tui in the
    terminal. It reads files of the run directory and never touches the run. Ctrl-C ends it; the run continues.

    shoal watch runs/tiny
    """

    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """The directory of a run, also of one that has not begun. None: the newest run below runs/."""

    tui: bool = False
    """Show it in the terminal; no server is started."""

    port: int = 0
    """The port on 127.0.0.1. 0: a free one."""

    no_browser: bool = False
    """Print the address and open no browser. Without a display none is opened."""

    json: bool = False
    """Print one JSON object and nothing else on stdout: the address, or with --tui the figures of this moment."""


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C; returns 0."""
    options = parse_options(Watch, arguments, prog="shoal watch")
    path = options.run or newest_run(RUNS, fix="shoal watch runs/NAME, which waits for it to begin")
    try:
        with signals_as_exceptions():
            if options.tui:
                from shoal.cli.runs.terminal import show_run

                show_run(path, as_json=options.json)
            else:
                _serve(path, options)
    except KeyboardInterrupt:
        print(f"\nthe run is not affected; shoal watch {path} shows it again", file=sys.stderr)
    return 0


def _serve(path: Path, options: Watch) -> None:
    server = WatchServer(path, options.port)
    forward = ssh_line(server.server_port, os.environ)
    if options.json:
        print(json.dumps({"run": str(path), "url": server.url, "ssh": forward or None}), flush=True)
    else:
        if not is_run(path):
            print(f"{path} holds no run yet: waiting for it to begin", file=sys.stderr)
        if forward:
            print(f"on your own machine: {forward}", file=sys.stderr)
        print(server.url, flush=True)
        print("Ctrl-C ends this; the run continues", file=sys.stderr)
    if not options.no_browser and has_display(os.environ):
        import webbrowser

        threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
    try:
        server.serve_forever(poll_interval=0.5)
    finally:
        server.ends.set()
        server.server_close()


def ssh_line(port: int, environment: Mapping[str, str]) -> str:
    """The command that leads a port of the reader's own machine here; empty: this host was not reached by ssh.

    >>> ssh_line(8000, {"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.2 22", "USER": "ada"})
    'ssh -N -L 8000:127.0.0.1:8000 ada@10.0.0.2'
    """
    words = environment.get("SSH_CONNECTION", "").split()
    if len(words) != 4:
        return ""
    user = environment.get("USER") or getpass.getuser()
    other = f"-p {words[3]} " if words[3] != "22" else ""
    return f"ssh -N -L {port}:127.0.0.1:{port} {other}{user}@{words[2]}"


def has_display(environment: Mapping[str, str]) -> bool:
    """Whether a browser that opens here is seen by who typed the command."""
    if environment.get("SSH_CONNECTION"):
        return False
    return sys.platform == "darwin" or any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))

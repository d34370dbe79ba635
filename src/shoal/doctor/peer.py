"""The doctor's process on another host: `python -m shoal.doctor.peer`. It answers requests, one JSON object a line.

    ►  {"token": "...", "look": {...}}                ◄  facts, findings and an open port of this host; see `look`
    ►  {"clock": true}                                ◄  {"clock": seconds}
    ►  {"reach": [["b", 41233], ...]}                 ◄  {"reached": [...]}, see `link.reach`
    ►  {"see": "/a/file", "text": "..."}              ◄  {"sees": true}

A request has a number, which its answer repeats: a late answer is not taken for that of the next request. The process
ends when its standard input does.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.doctor import link, needs
from shoal.doctor.bounded import run_checks
from shoal.doctor.checks import files
from shoal.doctor.checks.network import addresses
from shoal.doctor.checks.versions import facts
from shoal.doctor.finding import Level
from shoal.doctor.host import check_host
from shoal.files import read_regular

MARK = '{"peer": '
"""How each answer begins: login scripts may print other lines."""


def main() -> int:
    """Answer until the end of the standard input."""
    token = b""
    for line in sys.stdin:
        asked = json.loads(line)
        if "token" in asked:
            token = bytes.fromhex(asked["token"])
            said = _first_answer(token, asked.get("look"))
        else:
            said = _answer(asked, token)
        print(f"{MARK}{json.dumps({**said, 'number': asked.get('number', 0)})}}}", flush=True)
    return 0


def _first_answer(token: bytes, paths: Mapping[str, Any] | None) -> dict[str, Any]:
    findings = [each.as_mapping() for each in check_host() if each.level is not Level.OK]
    looked = None if paths is None else look(paths)
    port = link.listen(token)  # starts a thread, so it comes after the forks
    return {"name": socket.gethostname(), "facts": facts(), "findings": findings, "looked": looked,
            "port": port, "has": addresses()}  # fmt: skip


def look(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The findings about paths that a recipe names, as they are on this host (`found`), and how large its data is."""
    data = [Path(path) for path in asked["data"]]
    wanted = [needs.data_check(str(path)) for path in data]
    wanted += [files.directory_check(name, Path(path), fix, needed) for name, path, fix, needed in asked["folders"]]
    found = [each.as_mapping() for each in run_checks(wanted) if each.level is not Level.OK]
    return {"found": found, "contents": {str(path): files.contents(path) for path in data} if not found else {}}


def _answer(asked: Mapping[str, Any], token: bytes) -> dict[str, Any]:
    if "clock" in asked:
        return {"clock": time.time()}
    if "reach" in asked:
        return {"reached": [link.reach(str(name), int(port), token) for name, port in asked["reach"]]}
    try:
        return {"sees": read_regular(Path(asked["see"]), 4096).decode() == asked["text"]}
    except (OSError, UnicodeError):
        return {"sees": False}


if __name__ == "__main__":
    sys.exit(main())

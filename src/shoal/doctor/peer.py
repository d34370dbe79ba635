"""The doctor's process on another host: `python -m shoal.doctor.peer`. It answers requests, one JSON object a line.

    ►  {"token": "..."}                               ◄  facts, findings and an open port of this host
    ►  {"clock": true}                                ◄  {"clock": seconds}
    ►  {"reach": [["b", 41233], ...]}                 ◄  {"reached": [...]}, see `link.reach`
    ►  {"see": "/a/file", "text": "..."}              ◄  {"sees": true}

It ends when its standard input does.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.doctor import link
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
            said = _first_answer(token)
        else:
            said = _answer(asked, token)
        print(f"{MARK}{json.dumps(said)}}}", flush=True)
    return 0


def _first_answer(token: bytes) -> dict[str, Any]:
    findings = [each.as_mapping() for each in check_host() if each.level is not Level.OK]
    port = link.listen(token)  # starts a thread, so it comes after the forks
    return {"name": socket.gethostname(), "facts": facts(), "findings": findings, "port": port, "has": addresses()}


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

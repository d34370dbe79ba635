"""The few calls of etcd v3 that a run needs, over its HTTP and JSON gateway.

Keys and values are base64 there, and integers of 64 bits are text. Each call tries all endpoints in turn. An endpoint
that has not answered may still carry out a change later: a change that must not be made twice, or after a newer one,
compares the revision of what it replaces.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.errors import ShoalError

SECONDS = 0.5
"""Seconds in which an endpoint has to answer."""
MOST_ANSWER = 2**22
_URL = re.compile(r"etcd://(?P<hosts>[A-Za-z0-9.:,_-]+)/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,100})")


class Unreachable(Exception):
    """No endpoint of etcd has answered."""


class Record(NamedTuple):
    """A value, and the number of the change that has written it."""

    value: bytes | None
    """None: there is no such key."""
    revision: int


@dataclass(slots=True)
class Etcd:
    """The endpoints of one cluster of etcd, and the name of a run in it."""

    endpoints: list[tuple[str, int]]
    name: str
    _best: int = field(default=0)
    """The endpoint that has answered last."""

    @classmethod
    def at(cls, url: str) -> Etcd:
        """Read `etcd://a:2379,b:2379/NAME`."""
        found = _URL.fullmatch(url)
        ends = [part.rpartition(":") for part in found["hosts"].split(",")] if found else []
        if found is None or not all(host and port.isdecimal() for host, _, port in ends):
            what = f"--store must be etcd://HOST:PORT,.../NAME with a name for this run, got {url[:80]!r}"
            raise ShoalError(what, fix="--store etcd://a:2379,b:2379,c:2379/my-run", code="N093")
        return cls([(host, int(port)) for host, _, port in ends], found["name"])

    def read(self, *keys: str) -> list[Record]:
        """Return the records of some keys as they are at one moment."""
        ranges = [{"request_range": {"key": _encoded(key)}} for key in keys]
        answers = self._call("kv/txn", {"success": ranges})["responses"]
        return [_record(answer["response_range"].get("kvs", [])) for answer in answers]

    def change(self, puts: dict[str, bytes], *, unchanged: dict[str, int], deletes: Sequence[str] = ()) -> int | None:
        """Put and delete keys in one transaction, if others still have their revisions (0: there is no such key).
        Return the revision of all that was put; None: nothing was changed."""
        compare = [{"key": _encoded(key), "target": "MOD", "mod_revision": str(at)} for key, at in unchanged.items()]
        success = [{"request_put": {"key": _encoded(key), "value": _encoded(value)}} for key, value in puts.items()]
        success += [{"request_delete_range": {"key": _encoded(key)}} for key in deletes]
        answer = self._call("kv/txn", {"compare": compare, "success": success})
        return int(answer["header"]["revision"]) if answer.get("succeeded", False) else None

    def _call(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        why = ""
        for attempt in range(len(self.endpoints)):
            number = (self._best + attempt) % len(self.endpoints)
            connection = http.client.HTTPConnection(*self.endpoints[number], timeout=SECONDS)
            try:
                connection.request("POST", f"/v3/{what}", json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer = json.loads(response.read(MOST_ANSWER))
                if response.status == http.client.OK and isinstance(answer, dict) and "error" not in answer:
                    self._best = number
                    return answer
                why = str(answer)[:200]
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = str(error) or type(error).__name__
            finally:
                connection.close()
        ends = ", ".join(f"{host}:{port}" for host, port in self.endpoints)
        raise Unreachable(f"no etcd at {ends} answers: {why}")


def _encoded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _record(found: list[dict[str, str]]) -> Record:
    return (
        Record(base64.b64decode(found[0].get("value", "")), int(found[0]["mod_revision"])) if found else Record(None, 0)
    )

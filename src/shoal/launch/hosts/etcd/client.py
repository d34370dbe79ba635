"""The few calls of etcd v3 that a run needs, over its HTTP and JSON gateway.

Keys and values are base64 there, and integers of 64 bits are text. Each call tries all endpoints in turn.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ShoalError

SECONDS = 0.5
"""Seconds in which an endpoint has to answer."""
MOST_ANSWER = 2**22
_URL = re.compile(r"etcd://(?P<hosts>[A-Za-z0-9.:,_-]+)/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,100})")


class Unreachable(Exception):
    """No endpoint of etcd has answered."""


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

    def get(self, key: str) -> bytes | None:
        """Return a value; None: there is none."""
        found = self._call("kv/range", {"key": _encoded(key)}).get("kvs", [])
        return base64.b64decode(found[0].get("value", "")) if found else None

    def grant(self, seconds: int) -> str:
        """Return a new lease."""
        return str(self._call("lease/grant", {"TTL": seconds})["ID"])

    def renew(self, lease: str) -> bool:
        """Renew a lease; False: it has expired."""
        answer = self._call("lease/keepalive", {"ID": lease})
        return int(answer.get("result", answer).get("TTL", 0)) > 0

    def revoke(self, lease: str) -> None:
        """End a lease, and delete its keys."""
        self._call("lease/revoke", {"ID": lease})

    def put_if_absent(self, key: str, value: bytes, lease: str) -> bool:
        """Write a key under a lease, if there is none; return whether it was written."""
        absent = {"key": _encoded(key), "target": "CREATE", "create_revision": "0"}
        return self._put(key, value, absent, lease=lease)

    def put_if(self, key: str, value: bytes, *, other: str, has: bytes) -> bool:
        """Write a key, if another one has a value; return whether it was written."""
        return self._put(key, value, {"key": _encoded(other), "target": "VALUE", "value": _encoded(has)})

    def _put(self, key: str, value: bytes, condition: dict[str, Any], **options: str) -> bool:
        put = {"request_put": {"key": _encoded(key), "value": _encoded(value), **options}}
        return bool(self._call("kv/txn", {"compare": [condition], "success": [put]}).get("succeeded", False))

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

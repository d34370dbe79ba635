"""A store whose values only the ranks of one session can write and read.

torch's stores have no access control: any process that reaches one can list its keys, read and overwrite them. torch
stores there the addresses by which ranks connect, and NCCL's secret. A `SealedStore` encrypts each value and adds a MAC
over its name. So it rejects a changed value, a value of another name and a value of another session. It cannot reject
an older value of the same name and session, whose MAC is valid; torch writes most names once, so there is rarely one.
Counters are not protected: a process that changes one can only make ranks wait.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import timedelta

import torch.distributed as dist

from shoal.comm.rendezvous.listener_guard import guard_listeners
from shoal.comm.rendezvous.mac import TAG, mac
from shoal.errors import RunFailed

_NONCE = 16


class SealedStore(dist.Store):
    """A wrapper of a store that only ranks with the session key can read and write. torch calls it from C++ without a
    reference to the Python object, so the caller must hold one while groups are created."""

    def __init__(self, store: dist.Store, session: bytes) -> None:
        super().__init__()
        self._store = store
        self._cipher_key, self._mac_key = mac(session, "cipher"), mac(session, "store")

    def set(self, key: str, value: str | bytes) -> None:
        """Encrypt, sign and write."""
        guard_listeners()  # gloo publishes the number of its port through this call
        self._store.set(key, self.seal(key, value.encode() if isinstance(value, str) else bytes(value)))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a value, check it and decrypt it."""
        return self.unseal(key, self._store.get(key))

    def seal(self, key: str, value: bytes) -> bytes:
        """Return a value as it is written under this name: nonce, cipher text, MAC."""
        nonce = secrets.token_bytes(_NONCE)
        sealed = nonce + self._crypted(nonce, value)
        return sealed + mac(self._mac_key, key, sealed)

    def unseal(self, key: str, sealed: bytes) -> bytes:
        """Return the value. Raises if no rank of this session has written it under this name."""
        content, tag = sealed[:-TAG], sealed[-TAG:]
        if not hmac.compare_digest(tag, mac(self._mac_key, key, content)):
            raise RunFailed(
                f"the value of {key!r} in the store was not written by a rank of this run: another process changed it",
                fix="export MASTER_PORT=<another port>, and stop the process that can reach MASTER_ADDR:MASTER_PORT",
                code="N011",
            )
        return self._crypted(content[:_NONCE], content[_NONCE:])

    def _crypted(self, nonce: bytes, value: bytes) -> bytes:
        """XOR with SHAKE-256 of key and nonce; the same operation encrypts and decrypts."""
        stream = hashlib.shake_256(self._cipher_key + nonce).digest(len(value))
        return (int.from_bytes(value, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(value), "big")

    # ---- no values -------------------------------------------------------------------------------------------------

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which is not encrypted."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Count the keys of all sessions."""
        return self._store.num_keys()

    deleteKey = delete_key  # the names that torch calls from C++
    getNumKeys = num_keys

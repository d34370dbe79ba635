"""S3, and servers of its protocol, by s3fs.

An object of more than one part is sent in parts, several at a time, while the rest is still being hashed. It appears
when the last request completes it. Parts of an upload that was never completed are in no listing, and are paid for: the
next save aborts the uploads that a crash has left below its own directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any
from weakref import WeakKeyDictionary

from shoal.blueprint.faults import Faults
from shoal.checkpoint.storage.object_store import ObjectStore, StoredObject
from shoal.checkpoint.storage.retry import Requests
from shoal.checkpoint.storage.s3_ranges import Ranges
from shoal.url_filesystem import error_code

PART = 16 * 2**20
"""Bytes of a part. S3 requires at least 5 MiB, for all but the last."""
MOST_PARTS = 10_000
"""The most parts that an object of S3 may have."""
AT_ONCE = 8
"""Parts that are sent at a time: one connection alone is slow. As many are in memory beside the tensors."""

_listeners: WeakKeyDictionary[Any, Requests] = WeakKeyDictionary()
"""fsspec shares a client among all stores of a process. Its failed requests count for the newest store."""


class S3(ObjectStore):
    """A bucket. It is never created, and has no directories."""

    def __init__(self, system: Any, faults: Faults | None = None) -> None:
        super().__init__(system, faults)
        self._is_listening = False
        self._ranges = Ranges(system)

    def open(self, path: Path) -> StoredObject:
        """Open an object for reading, over connections of its own."""
        return _Object(self, path, self._ranges)

    def make(self, path: Path) -> None:
        """Abort uploads of steps below a path, which are left by a crash. s3fs would create a missing bucket here."""
        self._may_fail(path)
        with suppress(OSError):  # a user may lack the permission, and a server the function
            bucket, prefix, _ = self.system.split_path(str(path / "step-"))  # others may upload to this bucket, too
            self._abort_uploads(bucket, prefix)

    def make_draft(self, path: Path) -> None:
        """Do nothing: there are no directories."""
        self._may_fail(path)

    def create(self, path: Path, num_bytes: int = 0) -> Upload:
        """Begin an upload."""
        self._may_fail(path)
        return Upload(self, str(path), num_bytes)

    def _put(self, file: Any, parts: Sequence[memoryview]) -> None:
        file.write(parts)

    def close(self, file: Upload) -> None:
        """Complete an upload."""
        try:
            self._may_fail(file.path)
            file.complete()
        except BaseException:
            self.give_up(file)
            raise

    def give_up(self, file: Upload) -> None:
        """Abort an upload, as far as possible."""
        with suppress(OSError):  # `make` tries it again
            file.abort()

    def request(self, function: Any, *words: Any, **named: Any) -> Any:
        """Make a request, and count all that fail: also those that the client repeats by itself."""
        if not self._is_listening:
            self._is_listening = True
            with suppress(Exception):  # without credentials there is no client; the request says so
                _listen(self.system, self.requests)
        return super().request(function, *words, **named)

    def _abort_uploads(self, bucket: str, prefix: str) -> None:
        call = self.system.call_s3
        page: dict[str, str] = {}
        while True:
            found = self.request(call, "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page, is_patient=False)
            for upload in found.get("Uploads") or []:
                self.request(self.system.abort_mpu, bucket, upload["Key"], upload["UploadId"], is_patient=False)
            if not found.get("IsTruncated"):
                return
            page = {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}


class _Object(StoredObject):
    """An object that is read straight into memory, or by the client, if that does not work."""

    def __init__(self, store: S3, path: Path, ranges: Ranges) -> None:
        super().__init__(store, path)
        self._ranges, self._url = ranges, ranges.open(str(path))

    def close(self) -> None:
        """Close it, and after the last object of the store its connections."""
        self._ranges.close()

    def read_into(self, begin: int, view: memoryview) -> int:
        """Fill memory from the object at an offset; return the number of bytes read."""
        there = view[: max(0, self.size - begin)]
        if self._url is not None and there and self._ranges.read_into(self._url, begin, there):
            return len(there)
        return super().read_into(begin, view)


class Upload:
    """An object that is being written. For one thread; it keeps what is written until it was sent."""

    def __init__(self, store: S3, path: str, num_bytes: int) -> None:
        self.path = path
        self._store, self._call = store, store.system.call_s3
        bucket, key, _ = store.system.split_path(path)
        self._at = {"Bucket": bucket, "Key": key}
        self._part = max(PART, -(-num_bytes // MOST_PARTS))
        self._upload = dict(self._at)
        self._waiting: list[memoryview] = []
        self._num_waiting = self._size = 0
        self._threads: ThreadPoolExecutor | None = None
        self._free = BoundedSemaphore(AT_ONCE)
        self._sent: list[Future[dict[str, Any]]] = []

    def write(self, parts: Sequence[memoryview]) -> None:
        """Append to the object; wait while enough parts are being sent."""
        for data in parts:
            left = data
            while len(left):
                piece = left[: self._part - self._num_waiting]
                self._waiting.append(piece)
                self._num_waiting += len(piece)
                self._size += len(piece)
                left = left[len(piece) :]
                if self._num_waiting == self._part:
                    self._send()

    def complete(self) -> None:
        """Send the rest; the object exists when this returns."""
        if self._threads is None:
            body = b"".join(self._waiting)
            self._store.request(self._call, "put_object", **self._at, Body=body)
            return
        if self._waiting:
            self._send()
        parts = [{"PartNumber": number, "ETag": one.result()["ETag"]} for number, one in enumerate(self._sent, 1)]
        self._threads.shutdown()
        try:
            self._store.request(
                self._call, "complete_multipart_upload", **self._upload, MultipartUpload={"Parts": parts}
            )
        except OSError as error:
            if error_code(error) != "NoSuchUpload" or self._store.size(Path(self.path)) != self._size:
                raise  # else the answer to an earlier attempt was lost
        self._threads = None

    def abort(self) -> None:
        """Remove the parts that were sent."""
        threads, self._threads, self._waiting = self._threads, None, []
        if threads is not None:
            for one in self._sent:
                one.cancel()
            wait(self._sent)
            threads.shutdown()
            upload = self._upload
            self._store.request(
                self._store.system.abort_mpu, upload["Bucket"], upload["Key"], upload["UploadId"], is_patient=False
            )

    def _send(self) -> None:
        if self._threads is None:
            begun = self._store.request(self._call, "create_multipart_upload", **self._at)
            self._upload = {**self._at, "UploadId": begun["UploadId"]}
            self._threads = ThreadPoolExecutor(AT_ONCE, "shoal-upload")
        self._free.acquire()
        for one in self._sent:
            if one.done():
                one.result()  # raises what has failed
        data, self._waiting, self._num_waiting = self._waiting, [], 0
        self._sent.append(self._threads.submit(self._send_part, len(self._sent) + 1, data))

    def _send_part(self, number: int, data: list[memoryview]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._store.request(
                self._call, "upload_part", **self._upload, PartNumber=number, Body=b"".join(data)
            )
            return answer
        finally:
            self._free.release()


def _listen(system: Any, requests: Requests) -> None:
    """Count the attempts of a client that fail, also if a later one succeeds."""
    client = system.s3
    is_new = client not in _listeners
    _listeners[client] = requests
    if not is_new:
        return

    def count(response: Any = None, caught_exception: BaseException | None = None, **_: Any) -> None:
        why = ""
        if caught_exception is not None:
            why = type(caught_exception).__name__
        elif response is not None and (response[0].status_code >= 500 or response[0].status_code == 429):
            why = response[1].get("Error", {}).get("Code") or str(response[0].status_code)
        if why:
            _listeners[client].note(why)

    client.meta.events.register("needs-retry.s3", count)

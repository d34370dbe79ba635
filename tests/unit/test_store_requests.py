"""Requests to a store: which are repeated, for how long, and what is said about those that fail."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from shoal.checkpoint.storage import retry
from shoal.checkpoint.storage.object_store import ObjectStore
from shoal.checkpoint.storage.retry import Requests, is_passing, pause
from shoal.checkpoint.storage.store import Store
from shoal.url_filesystem import fix_of, reason


class ClientError(Exception):
    """As botocore's: the answer of S3 is an attribute."""

    def __init__(self, code: str) -> None:
        super().__init__(f"{code} it is")
        self.response = {"Error": {"Code": code}}


class EndpointConnectionError(Exception):
    """As botocore's, which is no `ConnectionError` of Python."""


class HTTPClientError(Exception):
    """As botocore's."""


class NoCredentialsError(Exception):
    """As botocore's."""


def answered(code: str, kind: Callable[..., OSError] = OSError) -> OSError:
    """An error as s3fs makes it of an answer."""
    error = kind(f"{code} it is")
    error.__cause__ = ClientError(code)
    return error


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "pause", lambda attempt: 0.001)


def failing(*errors: Exception) -> Callable[[], str]:
    """A function that fails in these ways, one after the other, and then works."""
    left = list(errors)

    def act() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return act


def test_a_busy_store_and_a_cut_connection_are_tried_again_and_counted() -> None:
    requests = Requests()
    assert requests(lambda: "here") == "here"
    assert requests.take_notes("s3://bucket/run") == []
    errors = [answered("SlowDown"), answered("SlowDown"), HTTPClientError("closed"), OSError(errno.EBUSY, "busy")]
    assert requests(failing(*errors)) == "done"
    (note,) = requests.take_notes("s3://bucket/run")
    assert note == (
        "s3://bucket/run did not answer 4 requests, which were repeated: SlowDown 2, HTTPClientError 1, OSError 1"
    )
    assert requests.take_notes("s3://bucket/run") == []


@pytest.mark.parametrize("code", ["AccessDenied", "NoSuchBucket", "InvalidPart"])
def test_a_permanent_error_is_raised_at_once(code: str) -> None:
    requests = Requests()
    assert requests(lambda: "here") == "here"
    with pytest.raises(OSError, match=code):
        requests(failing(answered(code)))
    assert requests.take_notes("s3://bucket/run") == []


def test_a_store_that_has_never_answered_is_not_waited_for() -> None:
    requests = Requests()
    with pytest.raises(OSError, match="HTTPClientError: no route"):
        requests(failing(HTTPClientError("no route")))
    assert requests(failing(answered("SlowDown"))) == "done"  # that is an answer
    assert requests(failing(HTTPClientError("closed"))) == "done"


def test_patience_ends_and_is_not_spent_on_tidying_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "PATIENCE", 0.05)
    requests = Requests()
    with pytest.raises(OSError, match="SlowDown"):
        requests(failing(*[answered("SlowDown")] * 10_000))
    assert requests.failed["SlowDown"] > 2
    before = requests.failed.total()
    with pytest.raises(OSError, match="SlowDown"):
        requests(failing(answered("SlowDown")), is_patient=False)
    assert requests.failed.total() == before


def test_pauses_grow_and_differ() -> None:
    for attempt, longest in ((0, 0.5), (1, 1.0), (3, 4.0), (30, retry.LONGEST_PAUSE)):
        found = {pause(attempt) for _ in range(20)}
        assert longest / 2 <= min(found) <= max(found) <= longest
        assert len(found) > 1


def test_which_errors_may_pass() -> None:
    assert is_passing(answered("SlowDown"))
    assert is_passing(answered("503"))
    assert is_passing(ConnectionResetError(errno.ECONNRESET, "reset"))
    assert not is_passing(answered("SignatureDoesNotMatch", PermissionError))
    assert not is_passing(NoCredentialsError("none"))
    assert not is_passing(ValueError("a defect"))


@pytest.mark.parametrize(
    ("error", "said", "fix"),
    [
        (answered("NoSuchBucket", FileNotFoundError), "NoSuchBucket: ", "aws s3 mb s3://bucket"),
        (answered("InvalidAccessKeyId", PermissionError), "InvalidAccessKeyId: ", "AWS_ACCESS_KEY_ID"),
        (NoCredentialsError("none"), "NoCredentialsError: none", "AWS_PROFILE"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "refused", "AWS_ENDPOINT_URL"),
    ],
)
def test_an_error_comes_with_its_reason_and_what_to_type(error: Exception, said: str, fix: str) -> None:
    assert said in reason(error)
    assert fix in (fix_of("s3://bucket/run", error) or "")
    assert fix_of("gs://bucket/run", error) is None  # other variables lead there


class Silent(LocalFileSystem):
    """A store that does not say whether a manifest is there."""

    def info(self, path: str, **named: Any) -> Any:
        if str(path).endswith("manifest.json"):
            raise PermissionError(errno.EACCES, "not allowed")
        return super().info(path, **named)


def test_a_step_stays_if_the_store_does_not_say_whether_it_is_complete(tmp_path: Path) -> None:
    step = tmp_path / "step-00000001"
    step.mkdir()
    (step / "manifest.json").write_text("{}")
    with pytest.raises(PermissionError):
        Store(tmp_path, ObjectStore(Silent(skip_instance_cache=True))).begin(2)
    assert (step / "manifest.json").exists()

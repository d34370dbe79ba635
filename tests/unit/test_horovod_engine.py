"""The control plane of `shoal.horovod` without ranks: order, fusion, mismatches, and who may connect."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

import shoal.horovod as hvd
from shoal.errors import RunFailed
from shoal.horovod.engine.coordinator import Coordinator
from shoal.horovod.engine.hub import Hub
from shoal.horovod.engine.link import accept_ranks, connect
from shoal.horovod.engine.messages import (
    Kind,
    Request,
    Response,
    TensorShape,
    decode_request,
    decode_response,
    encode,
)
from shoal.horovod.reduce_ops import ReduceOp


def request(name: str, *shape: int, kind: Kind = Kind.ALLREDUCE, **details: object) -> Request:
    return Request(kind=kind, name=name, tensors=(TensorShape("float32", shape),), **details)  # type: ignore[arg-type]


def test_a_name_is_released_when_every_rank_has_it() -> None:
    coordinator = Coordinator(3)
    for rank, names in enumerate(["ab", "ba", "b"]):
        for name in names:
            coordinator.add(rank, request(name, 2))
    assert [response.names for response in coordinator.take()] == [("b",)]
    coordinator.add(2, request("a", 2))
    assert [response.names for response in coordinator.take()] == [("a",)]


def test_small_tensors_of_one_kind_travel_together() -> None:
    def batches(fusion_bytes: int) -> list[tuple[str, ...]]:
        coordinator = Coordinator(1, fusion_bytes=fusion_bytes, largest_fused=64)
        for name, size, op in [("a", 5, 1), ("b", 5, 3), ("c", 5, 1), ("large", 20, 1), ("d", 15, 1), ("e", 2, 1)]:
            coordinator.add(0, request(name, size, op=op))
        return [each.names for each in coordinator.take()]

    assert batches(1000) == [("a", "c", "d", "e"), ("b",), ("large",)]  # b has another op; large would only be copied
    assert batches(90) == [("a", "c"), ("b",), ("large",), ("d", "e")]  # d does not fit any more


def test_rows_of_all_ranks_come_with_an_allgather() -> None:
    coordinator = Coordinator(2)
    coordinator.add(0, request("g", 3, 4, kind=Kind.ALLGATHER))
    coordinator.add(1, request("g", 0, 4, kind=Kind.ALLGATHER))
    [response] = coordinator.take()
    assert response.rows == (((3, 0),),)


def test_a_rank_that_leaves_fails_what_needs_it() -> None:
    coordinator = Coordinator(2)
    coordinator.add(0, request("waits", 2))
    for rank in range(2):
        coordinator.add(rank, request("ready", 2))
    coordinator.add(1, request("early", 2))
    coordinator.leave(1, "has ended")
    for name in ("early", "later"):
        coordinator.add(0, request(name, 2))
    responses = coordinator.take()
    assert sorted(response.names[0] for response in responses) == ["early", "later", "ready", "waits"]
    assert all("rank 1, which has ended [H005]" in response.error for response in responses)


def test_a_removed_set_fails_what_waits_in_it() -> None:
    coordinator = Coordinator(2)
    for rank in range(2):
        coordinator.add(rank, Request(kind=Kind.ADD_SET, name="add", rows=(0, 1, 2)))
    assert coordinator.take()[0].value == 1
    coordinator.add(0, request("x", 2, set_id=1))
    for rank in range(2):
        coordinator.add(rank, Request(kind=Kind.REMOVE_SET, name="remove", rows=(1,)))
    failed = next(each for each in coordinator.take() if each.names == ("x",))
    assert "H005" in failed.error


def test_stalled_names_are_reported_once() -> None:
    coordinator = Coordinator(2)
    coordinator.add(1, request("w", 2))
    assert coordinator.stalled(-1.0) == ["w: ready on ranks [1], missing on ranks [0]"]
    assert coordinator.stalled(-1.0) == []


def test_names_that_wait_too_long_fail() -> None:
    coordinator = Coordinator(2)
    coordinator.add(1, request("w", 2))
    coordinator.expire(60.0)
    assert not coordinator.take()
    coordinator.expire(-1.0)
    [response] = coordinator.take()
    assert response.names == ("w",)
    assert "H005" in response.error
    assert "for ranks [0]" in response.error
    assert not coordinator.stalled(-1.0)
    coordinator.add(0, request("w", 2))  # too late: it waits for the other rank's next one
    assert not coordinator.take()


def test_the_stall_time_that_is_set_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "60")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.1")
    hub, arrived = Hub(Coordinator(2), {}), queue.SimpleQueue[Response]()
    hub.start(arrived.put, lambda *_: None)
    hub.submit(request("w", 2))
    assert "for ranks [1]" in arrived.get(timeout=20).error
    hub.close()


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.SUM, ReduceOp.AVERAGE])
def test_joined_ranks_have_no_zero_for_other_reductions_than_sums(op: ReduceOp) -> None:
    coordinator = Coordinator(2)
    coordinator.add(0, Request(kind=Kind.JOIN, name="join"))
    coordinator.add(1, request("w", 2, op=int(op)))
    [response] = coordinator.take()
    is_sum = op in (ReduceOp.SUM, ReduceOp.AVERAGE)
    assert (response.error == "") == is_sum
    assert response.is_mismatch != is_sum
    assert is_sum or f"op={op.name} 'w' needs every rank, but rank 0 has called join()" in response.error


def test_variables_without_effect_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "/tmp/timeline.json")
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "0")
    hvd.init()
    hvd.shutdown()
    told = capsys.readouterr().err
    assert "no effect here: HOROVOD_TIMELINE (" in told


def test_messages_survive_json_and_nothing_else_is_read() -> None:
    sent = request("näme", 2, 0, root=3, prescale=0.25, rows=(1, 2))
    assert decode_request(encode(sent)) == sent
    coordinator = Coordinator(1)
    coordinator.add(0, sent)
    [response] = coordinator.take()
    assert decode_response(encode(response)) == response
    for bad in (b"{}", b"[1]", b"nonsense", b'["allreduce"]', encode(sent).replace(b"allreduce", b"exec")):
        with pytest.raises(ValueError, match=r".+"):
            decode_request(bad)


def test_a_process_without_the_secret_is_sent_away() -> None:
    accepted: dict[int, object] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ("127.0.0.1", server.getsockname()[1])
        thread = threading.Thread(target=lambda: accepted.update(accept_ranks(server, 2, b"secret", 20.0)))
        thread.start()
        with pytest.raises(RunFailed, match="H021"):
            connect(address, 1, b"guess", 10.0)
        link = connect(address, 1, b"secret", 10.0)
        thread.join()
        assert list(accepted) == [1]
        link.send(b"hello")
        assert accepted[1].receive() == b"hello"  # type: ignore[attr-defined]
        link.close()
        assert accepted[1].receive() is None  # type: ignore[attr-defined]
        accepted[1].close()  # type: ignore[attr-defined]

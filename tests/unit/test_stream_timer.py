"""A profile of a GPU, without one: events become times, parts add to the step, kernels become their use of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from shoal.comm.profile.intervals import union, without
from shoal.comm.profile.stream_timer import StreamTimer, is_in_backward
from shoal.comm.profile.stream_waits import StreamWaits
from shoal.comm.profile.timer import Span, Step, current, enter, part, waiting
from shoal.observe.profile.kernels import Kernel, gpu_use
from shoal.observe.profile.profile import Profile
from shoal.observe.profile.record import RankRecord
from shoal.observe.profile.verdict import _idle
from shoal.train.profile import sensors
from shoal.train.profile.operators import device_events
from shoal.train.profile.sensors import FIELDS, STAMP, Sensors, medians, parse_rows


class Stream:
    """A stream whose time a test moves on."""

    def __init__(self, cuda_stream: int = 0) -> None:
        self.cuda_stream, self.now_ms = cuda_stream, 0.0

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.now_ms = max(self.now_ms, event.at)


class Event:
    def __init__(self, **_: Any) -> None:
        self.at = -1.0

    def record(self, stream: Stream) -> None:
        self.at = stream.now_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    found = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    current.timer = StreamTimer()
    current.timer.begin_step()
    yield found
    current.timer = None


def milliseconds(step: Step) -> dict[str, float]:
    return {span.name: span.own / 1e6 for span in step.spans}


def test_parts_are_times_of_the_stream(stream: Stream) -> None:
    timer = current.timer
    assert isinstance(timer, StreamTimer)
    for _ in range(2):
        stream.now_ms += 3
        with part("forward"):
            stream.now_ms += 10
            with waiting("tp", timer.enter("group")):
                stream.now_ms += 4
        with part("backward"):
            stream.now_ms += 20
        timer.end_step()
    posted = enter("board")
    with part("forward"):  # of a step that does not end
        stream.now_ms += 1
    timer.resolve()
    assert [milliseconds(step) for step in timer.steps] == [
        {"tp": 4.0, "forward": 10.0, "backward": 20.0, "other": 3.0}
    ] * 2
    first, second = (step.spans[-1] for step in timer.steps)
    assert first.end == second.begin
    assert timer.entered["group|2"] - timer.entered["group|1"] == 37_000_000
    assert posted == "board|1"
    assert posted in timer.entered  # the host's own time


def test_threads_of_autograd_are_timed_and_others_are_not(stream: Stream) -> None:
    timer, seen = current.timer, []
    assert timer is not None
    thread = threading.Thread(target=lambda: seen.append(timer.is_timed_here()))
    thread.start()
    thread.join()
    assert seen == [False]
    assert not is_in_backward()
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: seen.append(is_in_backward()))
    (2 * weight).backward()
    assert seen == [False, True]


def test_a_stream_that_waits_for_a_collective_of_another_stream(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FSDP2 does it: the wait has the axis of the collective that the event is behind."""
    timer, waits, sent = current.timer, StreamWaits(), Stream(1)
    assert timer is not None
    restore = waits.watch(Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: sent)
    waits.note("dp_shard", timer.enter("group"))
    sent.now_ms = 7.0
    event = sent.record_event()
    stream.wait_event(Stream(2).record_event())  # behind no collective
    Stream(3).wait_event(event)  # not the stream that computes
    stream.wait_event(event)
    restore()
    timer.end_step()
    timer.resolve()
    assert milliseconds(timer.steps[0]) == {"dp_shard": 7.0, "other": 0.0}
    assert [span.key for span in timer.steps[0].spans if span.is_wait] == ["group|1"]


KERNELS = [
    Kernel("gemm", 0, 30_000_000, 7),
    Kernel("ncclDevKernel_AllReduce", 20_000_000, 50_000_000, 16),
    Kernel("gemm", 60_000_000, 70_000_000, 7),
]


def test_busy_time_is_a_union_and_communication_is_exposed_alone() -> None:
    found = gpu_use(KERNELS, steps=2, step_seconds=0.04)
    assert found["busy_seconds"] == pytest.approx(0.03)
    assert found["utilization"] == pytest.approx(0.75)
    assert found["communication_seconds"] == pytest.approx(0.015)
    assert found["exposed_seconds"] == pytest.approx(0.01)
    assert [each["kernel"] for each in found["kernels"]] == ["gemm", "ncclDevKernel_AllReduce"]
    assert union([(0, 10), (2, 4), (12, 12)]) == [(0, 10)]
    assert without([(0, 4)], []) == 4


def record(parts: dict[str, int]) -> RankRecord:
    spans, now = [], 0
    for name, milliseconds_of in parts.items():
        spans.append(Span(name, now, end=now + milliseconds_of * 1_000_000))
        now = spans[-1].end
    whole = Span("other", 0, end=now, inner=now)
    return RankRecord(0, "a", {}, 8, 2, [Step([*spans, whole], None)], {}, device="cuda")


def test_an_idle_gpu_is_a_verdict_and_cores_are_none(tmp_path: Path) -> None:
    def of(kernels: list[Kernel]) -> Profile:
        def gpu(seconds: float) -> dict[str, Any]:
            return gpu_use(kernels, steps=1, step_seconds=seconds)

        return Profile.of([record({"data": 5, "forward": 45, "backward": 50})], kernels=kernels, gpu=gpu)

    found = of(KERNELS)  # 60 ms of 100 ms
    assert found.verdict.kind == "idle"
    assert found.verdict.cost == pytest.approx(0.35)
    assert of([Kernel("gemm", 0, 93_000_000, 7)]).verdict.kind == "compute"
    assert found.to_mapping()["gpu"]["utilization"] == pytest.approx(0.6)
    assert "kernels compute 40% of a step, communication that they wait for 20%" in found.verdict.evidence
    found.write_trace(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert '"GPU, by part"' in text
    assert '"stream 16"' in text


def test_communication_while_a_rank_waits_is_no_computation() -> None:
    """Kernels compute 40 % of a step, in parts that take 60 %, and NCCL runs for the 30 % of a wait."""
    parts = [record({"data": 10, "tp": 30, "forward": 30, "backward": 30})]
    (wait,) = (span for span in parts[0].steps[0].spans if span.name == "tp")
    wait.is_wait = True
    kernels = [Kernel("gemm", 0, 40_000_000, 7), Kernel("ncclDevKernel_AllReduce", 40_000_000, 70_000_000, 16)]
    found = Profile.of(parts, gpu=lambda seconds: gpu_use(kernels, steps=1, step_seconds=seconds))
    assert found.more["gpu"]["utilization"] == pytest.approx(0.7)
    (idle,) = _idle(found.ranks[0], computing=0.4, exposed=0.3)
    assert idle.cost == pytest.approx(0.2)
    assert found.verdict.kind == "link", "30 % cost more"


def test_shadows_of_host_ranges_and_copies_are_no_kernels() -> None:
    def event(name: str, device: DeviceType) -> Any:
        return SimpleNamespace(name=lambda: name, device_type=lambda: device)

    both = [event("Optimizer.step#AdamW.step", kind) for kind in (DeviceType.CPU, DeviceType.CUDA)]
    rest = [event(name, DeviceType.CUDA) for name in ("gemm", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)")]
    assert [each.name() for each in device_events([*both, *rest])] == ["gemm"]


def test_sensors_are_medians_of_what_was_read() -> None:
    text = """\
2026/11/19 17:28:01.500, 1980, 1980, 500.0, 700.00, 54
2026/11/19 17:28:02.000, 1900, 1980, [N/A], 700.00, 55
a message, that, is, no, row, 1
2026/11/19 17:28:02.500, 1800, 1980, 600.0, 700.00, 56
2026/11/19 17:28:03.000, 19"""
    offset = round(datetime.strptime("2026/11/19 17:28:00.000", STAMP).timestamp() * 1e9)
    readings = parse_rows(text, offset)
    assert [when / 1e9 for when, _ in readings] == [1.5, 2.0, 2.5]
    assert medians(row for _, row in readings) == {
        "clock_mhz": 1900.0, "clock_mhz_max": 1980.0, "power_watts": 550.0, "power_watts_limit": 700.0,
        "temperature_celsius": 55.0,
    }  # fmt: skip
    assert medians([]) == {}


def test_sensors_are_those_of_the_profiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU idles for longer before the steps and after them."""
    watts = [80.0]
    monkeypatch.setattr(sensors, "_nvml_reader", lambda device: lambda: [watts[0]] * len(FIELDS))
    monkeypatch.setattr(sensors, "PERIOD", 0.001)
    found = Sensors(torch.device("cuda"))

    def wait_for(more: int) -> int:
        expected, deadline = len(found._readings) + more, time.monotonic() + 20
        while len(found._readings) < expected:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return time.monotonic_ns()

    wait_for(20)
    watts[0] = 700.0
    begin = wait_for(2)
    end = wait_for(3)
    watts[0] = 80.0
    wait_for(20)
    assert found.medians(begin, end)["power_watts"] == 700.0
    assert found.medians(end + 10**12, end + 2 * 10**12) == {}

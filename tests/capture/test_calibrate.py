"""A device is measured through its lanes."""

from __future__ import annotations

import threading
from collections import Counter
from unittest import mock

import pytest
import torch

from lightning_offload.capture import calibrate
from lightning_offload.capture.calibrate import (
    LinkRates,
    Transfer,
    measure_device,
    measure_interference,
    measure_transfers,
    share_lost,
    spec_of,
)
from lightning_offload.graph import DeviceSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def first_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compute loses to copies has not been measured yet, and is forgotten afterwards."""
    monkeypatch.setattr(calibrate, "_interference", {})


class Counting:
    """Transfers that copy nothing and count their calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sizes: set[int] = set()
        self._lock = threading.Lock()

    def transfer(self, name: str) -> Transfer:
        def call(storage: torch.UntypedStorage) -> None:
            with self._lock:
                self.calls[name] += 1
                self.sizes.add(storage.nbytes())

        return call


def test_measured_device_is_a_device_spec() -> None:
    """Each direction is tried once to warm up and three times to measure, on a block of the size asked for.

    The first time in a process more is swapped, beside a CPU's compute.
    """
    for is_first in (True, False):
        counting = Counting()
        device = measure_device(CPU, counting.transfer("out"), counting.transfer("in"), num_bytes=4096)
        assert (counting.calls["in"] > 4) == (counting.calls["out"] > 4) == is_first
        assert min(counting.calls.values()) >= 4
        assert counting.sizes == {4096}
    assert device.d2h_bytes_per_second > 0
    assert device.h2d_bytes_per_second > 0
    assert device.disk_write_bytes_per_second == device.disk_read_bytes_per_second == 0
    assert DeviceSpec.from_json(device.to_json()) == device


def test_a_disk_is_measured_where_there_is_one() -> None:
    """Writes come before reads, and their rates are part of the device."""
    names = ("out", "in", "write", "read")
    order: list[str] = []

    def transfer(name: str) -> Transfer:
        return lambda storage: order.append(name)

    out, back, write, read = map(transfer, names)
    device = measure_device(CPU, out, back, disk_write=write, disk_read=read, num_bytes=4096)
    assert order[:16] == [name for name in names for _ in range(4)]
    assert set(order[16:]) == {"out", "in"}
    assert device.disk_write_bytes_per_second > 0
    assert device.disk_read_bytes_per_second > 0


def test_what_is_not_there_is_none() -> None:
    """Without a disk and without measuring both directions at once only the two rates are known."""
    counting = Counting()
    rates = measure_transfers(
        CPU, counting.transfer("out"), counting.transfer("in"), both_at_once=False, num_bytes=4096
    )
    assert rates == LinkRates(
        d2h_bytes_per_second=rates.d2h_bytes_per_second, h2d_bytes_per_second=rates.h2d_bytes_per_second
    )


def test_both_directions_run_at_once() -> None:
    """Each direction makes its trials in a thread of its own, and goes on until the other has made its own."""
    threads: dict[str, set[str]] = {"out": set(), "in": set()}
    meeting = threading.Barrier(2, timeout=10)
    counting = Counting()

    def transfer(name: str) -> Transfer:
        count = counting.transfer(name)

        def call(storage: torch.UntypedStorage) -> None:
            count(storage)
            if threading.current_thread() is not threading.main_thread():
                if threading.current_thread().name not in threads[name]:
                    meeting.wait()  # passes only if both are under way
                threads[name].add(threading.current_thread().name)

        return call

    rates = measure_transfers(CPU, transfer("out"), transfer("in"), num_bytes=4096)
    assert [len(names) for names in threads.values()] == [1, 1]
    assert threads["out"].isdisjoint(threads["in"])
    assert all(name.startswith("lightning-offload") for names in threads.values() for name in names)
    assert min(counting.calls.values()) >= 7
    assert rates.both_d2h_bytes_per_second is not None
    assert rates.both_h2d_bytes_per_second is not None
    assert min(rates.both_d2h_bytes_per_second, rates.both_h2d_bytes_per_second) > 0


@pytest.mark.parametrize("failing", ["out", "in"])
def test_a_transfer_that_fails_ends_the_measurement(failing: str) -> None:
    """An error in one of two directions at once reaches the caller; no thread waits for it for ever."""
    counting = Counting()

    def transfer(name: str) -> Transfer:
        count = counting.transfer(name)

        def call(storage: torch.UntypedStorage) -> None:
            count(storage)
            if name == failing and threading.current_thread() is not threading.main_thread():
                raise RuntimeError("a copy failed")

        return call

    with pytest.raises(RuntimeError, match="a copy failed"):
        measure_transfers(CPU, transfer("out"), transfer("in"), num_bytes=4096)


def test_the_source_was_written() -> None:
    """What is swapped out has pages of its own: pages never written would all be one page of zeros."""
    seen: list[int] = []

    def swap_out(storage: torch.UntypedStorage) -> None:
        seen.append(sum(storage))

    measure_device(CPU, swap_out, lambda storage: None, num_bytes=64)
    assert len(seen) >= 4
    assert set(seen) == {64}


def test_what_compute_lost_is_a_share_of_what_copies_take(subtests: pytest.Subtests) -> None:
    """Noise makes it neither negative nor more than all of it."""
    for alone, beside, copies, share in [
        (1.0, 1.5, 1.0, 0.5),
        (1.0, 1.0, 1.0, 0.0),
        (1.0, 0.9, 1.0, 0.0),
        (1.0, 9.0, 1.0, 1.0),
        (1.0, 2.0, 0.0, 0.0),
    ]:
        with subtests.test(alone=alone):
            assert share_lost(alone, beside, copies) == share


def test_interference_is_measured_while_another_thread_copies() -> None:
    """Copies are made in threads of their own until compute was timed, and none after that."""
    threads = set()

    def copy() -> None:
        threads.add(threading.current_thread())

    assert 0.0 <= measure_interference(copy, 1e-3) <= 1.0
    assert len(threads) == 3
    assert threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)


def test_a_copy_that_fails_beside_compute_is_heard() -> None:
    """Its error reaches the caller, and no thread is left."""

    def copy() -> None:
        raise RuntimeError("a copy failed")

    with pytest.raises(RuntimeError, match="a copy failed"):
        measure_interference(copy, 1e-3)


def test_spec_has_the_rates_of_one_direction_at_a_time() -> None:
    """Planning knows the sequential rates; no disk is a disk of rate 0."""
    rates = LinkRates(
        d2h_bytes_per_second=4.0,
        h2d_bytes_per_second=3.0,
        both_d2h_bytes_per_second=2.0,
        both_h2d_bytes_per_second=1.0,
        disk_read_bytes_per_second=0.5,
    )
    spec = spec_of(CPU, rates)
    assert (spec.d2h_bytes_per_second, spec.h2d_bytes_per_second) == (4.0, 3.0)
    assert (spec.disk_write_bytes_per_second, spec.disk_read_bytes_per_second) == (0.0, 0.5)


def test_less_may_go_to_disk() -> None:
    """Its rates are those of what went there, and what comes back needs no more memory."""
    sizes: dict[str, int] = {}

    def transfer(name: str) -> Transfer:
        return lambda storage: sizes.update({name: storage.nbytes()})

    out, back, write, read = map(transfer, ("out", "in", "write", "read"))
    clock = map(float, range(1000))
    with mock.patch("lightning_offload.capture.calibrate.time.perf_counter", side_effect=clock):
        rates = measure_transfers(
            CPU, out, back, disk_write=write, disk_read=read, both_at_once=False, num_bytes=4096, disk_bytes=512
        )
    assert (rates.d2h_bytes_per_second, rates.h2d_bytes_per_second) == (4096, 4096)
    assert (rates.disk_write_bytes_per_second, rates.disk_read_bytes_per_second) == (512, 512)
    assert sizes == {"out": 4096, "in": 4096, "write": 4096, "read": 512}

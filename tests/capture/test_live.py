"""Live bytes are counted exactly, by identity."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_offload.capture.live import LiveBytes, LiveScanClock, heap_set_aside, live_storages
from lightning_offload.tensors.op_facts import facts_of
from tests.capture.devices import pretend_on
from tests.capture.recording import CPU, observe
from tests.engine.live_tracker import LiveStorageTracker

ROW = 4 * 100


def measure(step: object) -> LiveBytes:
    """Watch a step under the offload-all fallback."""
    live = LiveBytes(CPU)
    observe(step, live)  # type: ignore[arg-type]
    return live


def test_peak_of_temporaries_by_hand() -> None:
    """Results count from birth to death; the peak is that of the most at once."""
    x = torch.ones(100)

    def step() -> None:
        a = x + 1.0
        b = a + 1.0  # two alive
        del a
        c = b + 1.0  # two alive
        d = c + 1.0  # three alive
        del b, c, d
        x + 1.0

    live = measure(step)
    assert live.made_bytes == 3 * ROW
    assert live.peak_bytes == live.forward_peak_bytes == 4 * ROW
    assert live.backward_peak_bytes == 0


def test_views_and_in_place_ops_count_nothing() -> None:
    """One storage counts once, however many tensors are on it and however often it is written."""
    x = torch.ones(100)

    def step() -> None:
        y = x + 1.0
        y.view(10, 10).t()[:3].add_(1.0)
        y.zero_()

    assert measure(step).made_bytes == ROW


def test_peaks_are_told_by_op() -> None:
    """What was there at most since the op before: with what the op made, before what died goes."""
    x = torch.ones(100)

    def step() -> None:
        a = x + 1.0
        b = a + 1.0
        del a
        c = b + 1.0
        del b, c
        x + 1.0

    live = LiveBytes(CPU, [x.untyped_storage()], by_op=True)
    observe(step, live)
    assert live.by_op == [2 * ROW, 3 * ROW, 3 * ROW, 2 * ROW]
    assert measure(step).by_op is None


def test_a_lap_has_a_peak_of_its_own() -> None:
    """What was freed before it began does not count in it; what is still there does."""
    live = LiveBytes(CPU)
    x = torch.ones(100)

    def step() -> None:
        a, b = x + 1.0, x + 2.0
        del a
        live.begin_lap()
        c = b + 1.0
        del b
        c + 1.0

    observe(step, live)
    assert live.peak_bytes == live.lap_peak_bytes == 3 * ROW
    del step
    live.begin_lap()
    assert live.lap_peak_bytes == ROW


def test_backward_is_counted_apart() -> None:
    """Peaks of forward and backward are separate; a swapped tensor counts again when it is back."""
    x = torch.ones(100, requires_grad=True)

    def step() -> None:
        loss = x.exp().sum()
        loss.backward()

    live = measure(step)
    # forward: the result of exp, and the sum. It is swapped out while the program still holds it for the sum.
    assert live.forward_peak_bytes == x.nbytes + ROW + 4
    # backward: sum, seed, the result back (the seed is expanded without memory), and the product
    assert live.backward_peak_bytes == x.nbytes + 4 + 4 + 2 * ROW
    assert live.peak_bytes == live.backward_peak_bytes


def test_what_was_there_counts_until_it_dies() -> None:
    """Storages from before the step count from its beginning on, whether an op touches them or not."""
    held = [torch.ones(100), torch.ones(200), torch.ones(300)]
    live = LiveBytes(CPU, [tensor.untyped_storage() for tensor in held])

    def step() -> None:
        held[0] + 1.0
        held.pop()
        torch.ones(250) + 1.0

    observe(step, live)
    assert live.peak_bytes == max(6 * ROW + ROW, 3 * ROW + 2 * 1000)
    assert [size for _, size in live.external.values()] == [ROW]
    assert live.made_bytes == 2 * 1000


def test_a_scan_lists_each_storage_once() -> None:
    """Tensors that Python knows of; not what torch did not allocate, nor other devices, nor a gradient unasked."""
    before, meta = live_storages(CPU), torch.device("meta")
    before_on_meta = live_storages(meta)
    weight = torch.ones(100, requires_grad=True)
    (weight * 2.0).sum().backward()
    view, foreign = weight.detach()[:3], torch.from_numpy(np.ones(100))
    elsewhere = torch.ones(100, device="meta")
    found = {key: storage for key, storage in live_storages(CPU).items() if key not in before}
    assert [storage.nbytes() for storage in found.values()] == [ROW]
    assert weight.grad is not None
    found = {key: storage for key, storage in live_storages(CPU).items() if key not in before}
    assert [storage.nbytes() for storage in found.values()] == [ROW, ROW]
    assert weight.untyped_storage()._cdata in found
    found = {key: storage for key, storage in live_storages(meta).items() if key not in before_on_meta}
    assert [storage.nbytes() for storage in found.values()] == [ROW]
    del view, foreign, elsewhere


def test_a_census_counts_what_was_set_aside_as_long_as_it_lives() -> None:
    """And what came later; afterwards nothing is set aside any more."""
    gc.unfreeze()  # else it does nothing
    older, dying = torch.ones(100), torch.ones(100)
    gc.collect()  # what waits for that is no longer there within
    before = set(live_storages(CPU))
    with heap_set_aside():
        assert gc.get_freeze_count() > 0
        assert not any(item is older for item in gc.get_objects())
        assert set(live_storages(CPU)) == before
        key = dying.untyped_storage()._cdata
        del dying
        younger = torch.ones(100)
        now = live_storages(CPU)
        assert older.untyped_storage()._cdata in now
        assert younger.untyped_storage()._cdata in now
        assert key not in now or now[key].nbytes() == younger.nbytes
        older.set_(torch.ones(7).untyped_storage())
        assert live_storages(CPU)[older.untyped_storage()._cdata].nbytes() == 4 * 7
        with heap_set_aside():  # as if it were not there
            assert older.untyped_storage()._cdata in live_storages(CPU)
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    assert any(item is older for item in gc.get_objects())
    assert live_storages(CPU).keys() >= {older.untyped_storage()._cdata, younger.untyped_storage()._cdata}


def test_what_the_program_has_frozen_stays_frozen() -> None:
    """Its own freeze is not undone, nor widened; cycles that are dropped within are collected afterwards.

    Not by their number: other threads of the process let go of frozen objects meanwhile.
    """
    frozen = torch.ones(1)
    gc.freeze()
    try:
        free = torch.ones(1)
        with heap_set_aside():
            seen = {id(item) for item in gc.get_objects()}
            assert (id(frozen) in seen, id(free) in seen) == (False, True)
        seen = {id(item) for item in gc.get_objects()}
        assert (id(frozen) in seen, id(free) in seen) == (False, True)
    finally:
        gc.unfreeze()
    with pytest.raises(ValueError, match="a trial"), heap_set_aside():
        raise ValueError("a trial that failed")
    assert gc.get_freeze_count() == 0


def test_scans_take_no_more_than_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that took a second is due again after a hundred, for a share of one per cent."""
    clock, now = LiveScanClock(), 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert clock.is_due(0.01)
    with clock:
        now = 1.0
    now = 100.9
    assert not clock.is_due(0.01)
    assert clock.is_due(0.1)
    now = 101.1
    assert clock.is_due(0.01)


def test_agrees_with_an_independent_tracker() -> None:
    """Over a training step of a small net the peak equals that of a tracker that does not trust the runtime."""
    net = nn.Sequential(nn.Linear(64, 128), nn.Sigmoid(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(16, 64)
    there = [tensor.untyped_storage() for tensor in (*net.parameters(), x)]
    live = LiveBytes(CPU, there)

    def step() -> None:
        loss: Tensor = net(x).square().mean()
        loss.backward()

    with LiveStorageTracker() as tracker:
        tracker.register(net, x)
        with tracker.window() as window:
            observe(step, live)
    assert live.peak_bytes == window.peak_bytes
    assert len(live.external) == len(there)


def test_other_devices_of_the_type_do_not_count() -> None:
    """Tensors on cuda:1 are none of a step on cuda:0."""
    live = LiveBytes(torch.device("cuda", 0))
    results = [pretend_on("cuda:0"), pretend_on("cuda:1")]
    for result in results:
        live.on_op(facts_of(torch.ops.aten.exp.default), (pretend_on("cuda:1"),), {}, result, 0.0)
    assert live.peak_bytes == live.made_bytes == ROW


def _leaked(transform: Callable[[Callable[[Tensor], Tensor]], object]) -> Tensor:
    """A wrapper that outlives its transform."""
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x * 1)
        return x.sum()

    transform(function)
    return kept[0]


class _Mute(Tensor):
    """A subclass that answers nothing."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> _Mute:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device, dispatch_device=True
        )
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> object:
        raise ValueError("on purpose")


class _Loud(Tensor):
    """A subclass that must not be asked."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> object:
        raise ValueError("on purpose")


def _one_of_two_views() -> Tensor:
    base = torch.ones(4, requires_grad=True) * 1
    view, _ = base.split(2)
    base.mul_(2)
    return view


SECRETIVE: dict[str, Callable[[], Tensor]] = {
    "vmap": lambda: _leaked(lambda f: torch.vmap(f)(torch.ones(3, 4))),
    "grad": lambda: _leaked(lambda f: torch.func.grad(f)(torch.ones(4))),
    "jvp": lambda: _leaked(lambda f: torch.func.jvp(f, (torch.ones(4),), (torch.ones(4),))),
    "functionalize": lambda: _leaked(lambda f: torch.func.functionalize(f)(torch.ones(4))),
    "views": _one_of_two_views,
    "subclass": lambda: _Mute(torch.ones(3)),
    "loud": lambda: torch.ones(3).as_subclass(_Loud),
    "lazy": lambda: nn.LazyLinear(3).weight,
    "zero": lambda: torch._efficientzerotensor(3),
    "freed": lambda: torch.ones(3).set_(torch.UntypedStorage(0)),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", SECRETIVE)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_tensor_that_does_not_tell_ends_no_scan(name: str) -> None:
    """It is left out where it has no memory that could be asked for; all others count."""
    other = torch.ones(1000)
    kept = SECRETIVE[name]()
    assert other.untyped_storage()._cdata in live_storages(CPU)
    del kept


def test_a_storage_that_is_resized_counts_for_what_it_has() -> None:
    """What it has now is there before what it had goes, since it is copied; one that grows in an op counts as well."""
    held, other = torch.ones(100), torch.ones(100)
    live = LiveBytes(CPU, [held.untyped_storage(), other.untyped_storage()])
    peaks: list[int] = []

    def resize(tensor: Tensor, num_bytes: int) -> None:
        live.begin_lap()
        tensor.untyped_storage().resize_(num_bytes)
        peaks.append(live.lap_peak_bytes)

    def step() -> None:
        resize(held, 0)
        resize(held, 3 * ROW)
        resize(held, 2 * ROW)
        live.begin_lap()
        other.resize_(500)
        peaks.append(live.lap_peak_bytes)
        made = other + 1.0
        del made
        live.begin_lap()
        peaks.append(live.lap_peak_bytes)

    observe(step, live)
    assert peaks == [2 * ROW, 4 * ROW, 6 * ROW, (2 + 1 + 5) * ROW, 7 * ROW]
    assert sorted(size for _, size in live.external.values()) == [ROW, ROW]


def test_what_nobody_heard_of_shows_at_the_next_op() -> None:
    """A storage that was resized out of sight, as between two scopes, counts from the next op that reads it."""
    held = torch.ones(100)
    live = LiveBytes(CPU, [held.untyped_storage()])
    held.untyped_storage().resize_(4 * ROW)
    observe(lambda: held + 1.0, live)
    assert live.peak_bytes == (4 + 1) * ROW
    held.untyped_storage().resize_(0)
    other = torch.ones(100)
    live.begin_lap()
    observe(lambda: other + 1.0, live)
    assert live.lap_peak_bytes == 4 * ROW + 2 * ROW  # nobody has looked yet
    observe(lambda: held.numel() and held.detach().untyped_storage().resize_(ROW), live)
    live.begin_lap()
    assert live.lap_peak_bytes == 2 * ROW

"""Observers hear every event, in order; the base does nothing."""

from __future__ import annotations

import inspect
from typing import Any

from lightning_offload.tensors.observer import StepObserver, observe_all

EVENTS = [name for name in vars(StepObserver) if not name.startswith("_")]


def call_all(observer: StepObserver) -> list[str]:
    """Send each event once, with numbers for arguments."""
    for name in EVENTS:
        count = len(inspect.signature(getattr(StepObserver, name)).parameters) - 1
        getattr(observer, name)(*range(count))
    return EVENTS


def noting(name: str, log: list[tuple[str, str, tuple[Any, ...]]]) -> StepObserver:
    """An observer that writes down what it hears."""
    observer = StepObserver()
    for event in EVENTS:
        setattr(observer, event, lambda *args, event=event: log.append((name, event, args)))
    return observer


def test_base_does_nothing() -> None:
    """Every hook of the base takes its arguments and does nothing."""
    assert call_all(StepObserver()) == EVENTS
    assert len(EVENTS) == 12


def test_no_observers_are_none() -> None:
    """Without observers the runtime is told so, and spares the calls."""
    assert observe_all(()) is None


def test_one_observer_is_itself() -> None:
    """A single observer is called directly."""
    observer = StepObserver()
    assert observe_all((observer,)) is observer


def test_several_observers_hear_the_same_in_order() -> None:
    """Each event reaches all observers with all its arguments, in the order in which they were given."""
    log: list[tuple[str, str, tuple[Any, ...]]] = []
    both = observe_all((noting("a", log), noting("b", log)))
    assert both is not None
    call_all(both)
    assert [event for name, event, _ in log if name == "a"] == EVENTS
    assert log[0::2] == [("a", event, args) for _, event, args in log[1::2]]

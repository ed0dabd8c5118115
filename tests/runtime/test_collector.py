"""The collector's threshold: higher while a step holds objects, the program's own otherwise."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from lightning_offload.graph.memory_plan import Action
from lightning_offload.runtime.collector import Allowance
from lightning_offload.runtime.hooks import executing
from tests.runtime.executing import compiled, executor_for

OWN = 700


@pytest.fixture(autouse=True)
def own_threshold() -> Iterator[None]:
    """The threshold of the program, given back afterwards."""
    before = gc.get_threshold()
    gc.set_threshold(OWN, 10, 10)
    yield
    assert gc.get_threshold()[1:] == (10, 10)
    gc.set_threshold(*before)


def first() -> int:
    """The threshold of the youngest generation."""
    return gc.get_threshold()[0]


def test_threshold_is_higher_for_as_long_as_objects_live() -> None:
    """By their sum, in whatever order they go."""
    one, other = Allowance(1000), Allowance(50)
    assert first() == OWN + 1050
    del one
    assert first() == OWN + 50
    del other
    assert first() == OWN
    nothing = Allowance(0)
    assert first() == OWN
    del nothing
    assert first() == OWN


def test_threshold_that_the_program_sets_meanwhile_is_kept() -> None:
    """It is the program's own from then on."""
    one = Allowance(1000)
    gc.set_threshold(90, 10, 10)
    other = Allowance(5)
    assert first() == 90 + 1005
    del one, other
    assert first() == 90


def test_collector_that_is_off_stays_off() -> None:
    """Whether it was before or is turned off meanwhile; what is set once it is on again holds."""
    gc.set_threshold(0, 10, 10)
    allowance = Allowance(1000)
    assert first() == 0
    del allowance
    assert first() == 0
    gc.set_threshold(OWN, 10, 10)
    allowance = Allowance(1000)
    raised = first()
    gc.set_threshold(0, 10, 10)
    del allowance
    assert first() == 0
    gc.set_threshold(raised, 10, 10)  # as who turned it off found it
    allowance = Allowance(7)
    assert first() == OWN + 7
    del allowance
    assert first() == OWN


def test_threshold_that_is_put_back_later_is_the_programs() -> None:
    """As who remembers it within a step and puts it back after that."""
    for size in (1000, 50, 1000):
        allowance = Allowance(size)
        before = gc.get_threshold()
        gc.set_threshold(10**6, 10, 10)
        del allowance
        gc.set_threshold(*before)
    allowance = Allowance(7)
    assert first() == OWN + 7
    del allowance
    assert first() == OWN


def test_largest_threshold_stays() -> None:
    """There is none above it."""
    gc.set_threshold(2**31 - 1, 10, 10)
    allowance = Allowance(1000)
    assert first() == 2**31 - 1
    del allowance
    assert first() == 2**31 - 1


def test_threads_leave_the_threshold_as_it_was() -> None:
    """Many that come and go at once."""

    def come_and_go() -> None:
        for size in range(1, 300):
            held = [Allowance(size), Allowance(1)]
            del held

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first() == OWN


def test_garbage_of_the_program_is_collected_within_a_step() -> None:
    """After as many objects of its own as without one."""

    class Node:
        def __init__(self) -> None:
            self.me = self

    allowance = Allowance(5000)
    held = [[] for _ in range(5000)]  # type: ignore[var-annotated]
    found = weakref.ref(Node())
    more = [[] for _ in range(2 * OWN)]  # type: ignore[var-annotated]
    assert found() is None
    assert len(held) + len(more) == 5000 + 2 * OWN
    del allowance


@pytest.mark.parametrize("action", ["keep", "swap", "recompute"])
def test_what_a_step_holds_is_about_what_is_allowed(action: Action) -> None:
    """So that a forward is never looked through, and no more than that is left uncounted."""
    x = torch.linspace(-1.0, 1.0, 100).requires_grad_()

    def step() -> torch.Tensor:
        y = x
        for _ in range(200):
            y = (y * 1.25).sin()
        return y.sum()

    program = compiled(step, action)
    executor = executor_for(program)
    gc.collect()
    with executing(executor):
        assert first() == OWN + program.num_objects
        before = gc.get_count()[0]
        loss = step()
        held = gc.get_count()[0] - before
        assert gc.get_count()[1] == 0  # it did not run
        assert 0.4 * program.num_objects < held < program.num_objects + OWN
        loss.backward()
    del loss, executor
    assert first() == OWN

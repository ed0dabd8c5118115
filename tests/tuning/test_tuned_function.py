"""What is decorated has to be a function that trains when it is called with a batch size; methods are such, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from lightning_offload import TuningError, UnsupportedError
from lightning_offload.tuning.function import find_efficient_batch_size


def test_batch_size_given() -> None:
    """A call that gives the batch size, or misses an argument, is an error before anything is tried."""
    called: list[int] = []

    def train(batch_size: int, model: object) -> None:
        called.append(batch_size)

    for args in ((64, None), ()):
        with pytest.raises(
            TypeError, match=r"`train` cannot be called with these arguments .* leave out the batch size"
        ):
            find_efficient_batch_size(train)(*args)
    with pytest.raises(TypeError, match="takes no argument"):
        find_efficient_batch_size(lambda: None)()
    with pytest.raises(TypeError, match="which only a keyword can give"):
        find_efficient_batch_size(lambda *, batch_size: None)()
    assert called == []


def _generator(batch_size: int) -> Any:
    yield batch_size


async def _coroutine(batch_size: int) -> None: ...


async def _asynchronous_generator(batch_size: int) -> Any:
    yield batch_size


class _AsynchronousCall:
    async def __call__(self, batch_size: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (64, "64 is a int, not a training function"),
        (_generator, "`_generator` does not train when it is called, it makes a generator"),
        (functools.partial(_generator), "`_generator` does not train when it is called, it makes a generator"),
        (_coroutine, "makes a coroutine"),
        (_asynchronous_generator, "makes an asynchronous generator"),
        (_AsynchronousCall(), "`_AsynchronousCall` does not train when it is called, it makes a coroutine"),
        (staticmethod(print), "write @staticmethod above the decorator"),
    ],
)
def test_not_a_function(function: Any, message: str) -> None:
    """What cannot train when it is called is refused when it is decorated."""
    with pytest.raises(TuningError, match=message):
        find_efficient_batch_size(function)


class Runner:
    """Finds its batch size itself."""

    @find_efficient_batch_size(starting_batch_size=4, min_size=4, max_size=4)
    def train(self, batch_size: int, scale: float) -> tuple[int, float]:
        """Its docstring."""
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(9):
            model(torch.ones(batch_size, 2)).sum().backward()
            optimizer.step()
        return batch_size, scale


def test_methods() -> None:
    """A decorated method is called as a method, takes the batch size after `self`, and each object finds its own."""
    one, other = Runner(), Runner()
    assert one.train(0.5) == (4, 0.5)
    assert one.train.result.batch_size == 4
    assert other.train.result is None
    assert Runner.train.result is None
    assert (Runner.train.__name__, Runner.train.__doc__) == ("train", "Its docstring.")
    with pytest.raises(TypeError, match="leave out the batch size"):
        other.train(64, 0.5)


def test_nowhere_to_keep_it() -> None:
    """An object that cannot remember its size is told what to do."""

    class Slotted:
        __slots__ = ()

        @find_efficient_batch_size
        def train(self, batch_size: int) -> None: ...

    with pytest.raises(UnsupportedError, match="`train` has nowhere to keep the batch size"):
        _ = Slotted().train

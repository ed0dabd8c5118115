"""What fake tensors of integers hold is known where it was computed, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from lightning_offload.capture.known_values import MOST_ELEMENTS, KnownValues, tell, value_of


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    """Tensors are fake."""
    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues():
        yield


KNOWN: list[tuple[Callable[[], Tensor], list[int]]] = [
    (lambda: torch.arange(3), [0, 1, 2]),
    (lambda: torch.tensor([2, 1]), [2, 1]),
    (lambda: (torch.arange(6).view(2, 3)[:, 1] + 1).flip(0), [5, 2]),
    (lambda: torch.diff(torch.arange(4), prepend=torch.tensor([-1])), [1, 1, 1, 1]),
    (lambda: (torch.ones(2, 2, dtype=torch.int64) != 1).cumsum(-1).flatten(), [0, 0, 0, 0]),
    (lambda: torch.ones_like(torch.empty(2, dtype=torch.int64)), [1, 1]),
]
UNKNOWN: list[Callable[[], Tensor]] = [
    lambda: torch.empty(2, dtype=torch.int64),
    lambda: torch.randint(0, 2, (2,)),
    lambda: torch.arange(2) + torch.randint(0, 2, (2,)),
    lambda: torch.ones(2),  # no integers
    lambda: torch.ones(2).to(torch.int64),
    lambda: torch.zeros(MOST_ELEMENTS + 1, dtype=torch.bool),
    lambda: torch.zeros(2, dtype=torch.int64).fill_(1),  # written
]


def test_computed_from_nothing(subtests: pytest.Subtests) -> None:
    """Through views, sums and comparisons; a program may ask for any of them."""
    for make, expected in KNOWN:
        with subtests.test(make=make):
            made = make()
            value = value_of(made)
            assert value is not None
            assert [int(item) for item in made] == expected
            assert value.dtype is made.dtype
            assert value.shape == made.shape


def test_not_known(subtests: pytest.Subtests) -> None:
    """Random, uninitialised, real or large."""
    for make in UNKNOWN:
        with subtests.test(make=make):
            assert value_of(make()) is None
            with pytest.raises(DataDependentOutputException):
                bool((make() == 0).all())


def test_a_write_is_the_end_of_it() -> None:
    """Of all tensors on its memory, and of no other."""
    count = torch.arange(4)
    part, copy = count[1:], count + 0
    count[2] = 0
    assert value_of(count) is None
    assert value_of(part) is None
    assert value_of(copy) is not None


def test_told() -> None:
    """A tensor that stands for another may have its values."""
    made = torch.empty(3, dtype=torch.int64)
    tell(made, value_of(torch.arange(3)))
    assert made.sum().item() == 3
    tell(made, None)
    assert value_of(made) is not None

"""Objects of others with methods of ours, and their copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from lightning_offload.plugins.class_swap import graft, ungraft


class Ours:
    """What is ours."""

    grafted_attributes = ("hooks",)

    hooks: object

    def answer(self) -> str:
        return f"ours, {super().answer()}"  # type: ignore[misc]


class Plain:
    def __init__(self, number: int = 1) -> None:
        self.number = number

    def answer(self) -> str:
        return f"theirs {self.number}"


class Slotted(Plain):
    __slots__ = ("slot",)

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.slot = "kept"


class New(Plain):
    def __new__(cls, number: int) -> New:
        made = super().__new__(cls)
        made.number = number
        return made

    def __getnewargs__(self) -> tuple[int]:
        return (self.number,)


class NewWithKeywords(Plain):
    def __new__(cls, *, number: int) -> NewWithKeywords:
        made = super().__new__(cls)
        made.number = number
        return made

    def __init__(self, *, number: int) -> None:
        super().__init__(number)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"number": self.number}


class Reduced(Plain):
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.number,)


class WithState(Plain):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "was_saved": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle, {protocol}": lambda target, protocol=protocol: pickle.loads(pickle.dumps(target, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [Plain, Slotted, New, lambda n: NewWithKeywords(number=n), Reduced, WithState])
def test_copies_are_of_the_own_class(make: Callable[[int], Plain], way: str) -> None:
    """They do without our methods and attributes, which cannot be copied; the object keeps both."""
    target: Any = make(3)
    cls = type(target)
    graft(target, Ours)
    target.hooks = (each for each in ())  # a generator: neither copied nor pickled
    other = WAYS[way](target)
    assert type(other) is cls
    assert other.answer() == "theirs 3"
    assert not hasattr(other, "hooks")
    assert getattr(other, "slot", "kept") == "kept"
    assert target.answer() == "ours, theirs 3"
    assert hasattr(target, "hooks")
    ungraft(target, Ours)
    assert type(target) is cls
    assert not hasattr(target, "hooks")


def test_parts_are_copied_once() -> None:
    """An object that refers to itself is one in its copy, too."""
    target: Any = Plain(3)
    target.itself = [target]
    graft(target, Ours)
    other = copy.deepcopy(target)
    assert other.itself[0] is other
    assert pickle.loads(pickle.dumps(target)).itself[0].number == 3

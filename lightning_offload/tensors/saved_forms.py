"""What saved tensors look like, by which a step whose structure changes is recognised as it goes.

A size that depends on data (how many tokens an expert is given) may be any: it is open in the form. Torch tells which
ops make such sizes; others show in two recordings of one structure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

OPEN = -1
"""A size that may be any."""


class SavedForm(NamedTuple):
    """What a saved tensor looks like.

    Attributes:
        dtype: Type of its elements; None of one that is not plain.
        shape: Its sizes; :data:`OPEN` where they depend on data.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]

    @property
    def kind(self) -> tuple[torch.dtype | None, int]:
        """What is the same whatever the sizes."""
        return self.dtype, len(self.shape)

    def admits(self, other: SavedForm) -> bool:
        """Whether a tensor of another form may be one of this."""
        if self == other:
            return True
        return self.kind == other.kind and all(
            mine in (size, OPEN) for mine, size in zip(self.shape, other.shape, strict=True)
        )


def form_of(tensor: Tensor, *, is_plain: bool) -> SavedForm:
    """What a tensor that autograd saves looks like."""
    return SavedForm(tensor.dtype, tuple(tensor.shape)) if is_plain else SavedForm(None, ())


def opened(forms: Iterable[SavedForm], sizes: Collection[int]) -> tuple[SavedForm, ...]:
    """Forms with some sizes left open."""
    if not sizes:
        return tuple(forms)
    return tuple(form._replace(shape=tuple(OPEN if size in sizes else size for size in form.shape)) for form in forms)


def sizes_that_vary(one: Sequence[SavedForm], other: Sequence[SavedForm]) -> set[int]:
    """The sizes at which two steps differ that save tensors of the same kinds in the same order; none otherwise."""
    if [form.kind for form in one] != [form.kind for form in other]:
        return set()
    found: set[int] = set()
    for mine, others in zip(one, other, strict=True):
        if mine != others:
            found.update(s for pair in zip(mine.shape, others.shape, strict=True) if pair[0] != pair[1] for s in pair)
    return found

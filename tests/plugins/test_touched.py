"""What is on the device beside a step, by what the recorded one touched."""

from __future__ import annotations

import random
import weakref

import pytest
import torch

from lightning_offload.plugins.baseline import There
from lightning_offload.plugins.touched import Touched

WEIGHT_BYTES, BATCH_BYTES, OTHER_BYTES = 400, 40, 4000


def _storage(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()


def _touched(*storages: torch.UntypedStorage) -> Touched:
    references = {storage._cdata: weakref.ref(storage) for storage in storages}
    return Touched(references, [(weakref.ref(storage), storage.nbytes()) for storage in storages])


def test_storages_that_died_are_not_taken_for_touched() -> None:
    """An address is used again: only a storage that still lives counts as one that the step touches."""
    weight, batch = _storage(WEIGHT_BYTES), _storage(BATCH_BYTES)
    touched = _touched(weight, batch)
    assert touched.now() == {weight._cdata, batch._cdata}
    del batch
    assert touched.now() == {weight._cdata}


def test_what_is_neither_touched_nor_a_gradient_is_beside_the_step() -> None:
    """Whoever has made it; a batch that is gone has another one in its place as the next step begins."""
    weight, batch, other, gradient = map(_storage, (WEIGHT_BYTES, BATCH_BYTES, OTHER_BYTES, WEIGHT_BYTES))
    touched = _touched(weight, batch)
    storages = {storage._cdata: storage for storage in (weight, batch, other, gradient)}
    there = There(storages)
    assert touched.bytes_beside(there, {gradient._cdata}, has_inputs=True) == OTHER_BYTES
    del storages[batch._cdata], batch
    new = _storage(BATCH_BYTES)
    storages[new._cdata] = new
    assert touched.bytes_beside(there, {gradient._cdata}, has_inputs=True) == OTHER_BYTES
    assert touched.bytes_beside(there, {gradient._cdata}, has_inputs=False) == OTHER_BYTES + BATCH_BYTES


@pytest.mark.parametrize("seed", range(40))
def test_what_is_followed_says_what_a_listing_says(seed: int) -> None:
    """Where each storage that is gone was replaced by one as large, both count the same beside the coming step.

    A step may be given what it does not read, and read what it is not given: what the program made anew since, too.
    """
    draw = random.Random(seed)
    kinds = [[_storage(draw.randint(1, 9)) for _ in range(draw.randint(0, 4))] for _ in range(6)]
    weights, inputs, unread, read, carried, beside = kinds
    touched = _touched(*weights, *inputs, *read, *carried)
    beside_bytes = sum(storage.nbytes() for storage in (*beside, *unread))
    given = [_storage(storage.nbytes()) for storage in (*inputs, *unread)]
    made_anew = [_storage(storage.nbytes()) for storage in carried]
    stay = [storage for storage in (*read, *beside) if draw.random() < 0.3]
    gone = [storage.nbytes() for storage in (*read, *beside) if storage not in stay]
    kinds.clear()
    inputs = unread = read = carried = beside = []
    known = {storage._cdata: storage for storage in (*weights, *stay, *made_anew, *given)}
    given_keys = [storage._cdata for storage in given]
    followed = There(known, given=given_keys, replaced=gone, is_whole=False)
    assert touched.bytes_beside(followed, (), has_inputs=True) == beside_bytes
    new = [_storage(num_bytes) for num_bytes in gone]
    listed = There(known | {storage._cdata: storage for storage in new}, given=given_keys)
    assert touched.bytes_beside(listed, (), has_inputs=True) == beside_bytes


def test_an_input_may_be_larger_than_the_recorded_one() -> None:
    """A view of a larger storage, say: what is more of it lies beside the step."""
    touched = _touched(_storage(BATCH_BYTES))
    given = _storage(BATCH_BYTES + 3)
    followed = There({given._cdata: given}, given=[given._cdata], is_whole=False)
    assert touched.bytes_beside(followed, (), has_inputs=True) == 3


def test_the_allocators_figure_says_the_same() -> None:
    """In what it has handed out."""
    weight, batch = _storage(WEIGHT_BYTES), _storage(BATCH_BYTES)
    touched = _touched(weight, batch)
    allocated = 512 + 512 + 1024 + OTHER_BYTES

    def taken(num_bytes: int) -> int:
        return -(-num_bytes // 512) * 512

    assert touched.bytes_beside_of(allocated, 1024, taken, has_inputs=True) == OTHER_BYTES
    del batch
    assert touched.bytes_beside_of(allocated, 1024, taken, has_inputs=False) == OTHER_BYTES + 512


def test_nothing_is_told_of_what_was_not_looked_at() -> None:
    """Before the first recorded step."""
    assert Touched().now() == set()
    assert Touched().bytes_beside(There({}), (), has_inputs=True) is None
    assert Touched().bytes_beside_of(10, 0, int, has_inputs=True) is None

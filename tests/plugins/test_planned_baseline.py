"""What is on the device beside a step, by what the recorded one touched."""

from __future__ import annotations

import random
import weakref

import pytest
import torch

from lightning_offload.plugins.baseline import There
from lightning_offload.plugins.planned_baseline import ExternalStorages

WEIGHT_BYTES, BATCH_BYTES, OTHER_BYTES = 400, 40, 4000


def _storage(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()


def _external(*storages: torch.UntypedStorage) -> ExternalStorages:
    references = {storage._cdata: weakref.ref(storage) for storage in storages}
    return ExternalStorages(references, [(weakref.ref(storage), storage.nbytes()) for storage in storages])


def test_storages_that_died_are_not_taken_for_external() -> None:
    """An address is used again: only a storage that still lives counts as one that the step touches."""
    weight, batch = _storage(WEIGHT_BYTES), _storage(BATCH_BYTES)
    external = _external(weight, batch)
    assert external.now() == {weight._cdata, batch._cdata}
    del batch
    assert external.now() == {weight._cdata}


def test_what_is_neither_touched_nor_a_gradient_is_beside_the_step() -> None:
    """Whoever has made it; a batch that is gone has another one in its place as the next step begins."""
    weight, batch, other, gradient = map(_storage, (WEIGHT_BYTES, BATCH_BYTES, OTHER_BYTES, WEIGHT_BYTES))
    external = _external(weight, batch)
    storages = {storage._cdata: storage for storage in (weight, batch, other, gradient)}
    there = There(storages)
    assert external.baseline_bytes(there, {gradient._cdata}, has_inputs=True) == OTHER_BYTES
    del storages[batch._cdata], batch
    new = _storage(BATCH_BYTES)
    storages[new._cdata] = new
    assert external.baseline_bytes(there, {gradient._cdata}, has_inputs=True) == OTHER_BYTES
    assert external.baseline_bytes(there, {gradient._cdata}, has_inputs=False) == OTHER_BYTES + BATCH_BYTES


@pytest.mark.parametrize("seed", range(40))
def test_what_is_followed_says_what_a_listing_says(seed: int) -> None:
    """Where each storage that is gone was replaced by one as large, both count the same beside the coming step.

    A step may be given what it does not read, and read what it is not given: what the program made anew since, too.
    """
    draw = random.Random(seed)
    kinds = [[_storage(draw.randint(1, 9)) for _ in range(draw.randint(0, 4))] for _ in range(6)]
    weights, inputs, unread, read, carried, baseline = kinds
    external = _external(*weights, *inputs, *read, *carried)
    baseline_bytes = sum(storage.nbytes() for storage in (*baseline, *unread))
    given = [_storage(storage.nbytes()) for storage in (*inputs, *unread)]
    made_anew = [_storage(storage.nbytes()) for storage in carried]
    stay = [storage for storage in (*read, *baseline) if draw.random() < 0.3]
    gone = [storage.nbytes() for storage in (*read, *baseline) if storage not in stay]
    kinds.clear()
    inputs = unread = read = carried = baseline = []
    known = {storage._cdata: storage for storage in (*weights, *stay, *made_anew, *given)}
    given_keys = [storage._cdata for storage in given]
    followed = There(known, inputs=given_keys, replaced=gone, is_whole=False)
    assert external.baseline_bytes(followed, (), has_inputs=True) == baseline_bytes
    new = [_storage(num_bytes) for num_bytes in gone]
    listed = There(known | {storage._cdata: storage for storage in new}, inputs=given_keys)
    assert external.baseline_bytes(listed, (), has_inputs=True) == baseline_bytes


def test_an_input_may_be_larger_than_the_recorded_one() -> None:
    """A view of a larger storage, say: what is more of it lies beside the step."""
    external = _external(_storage(BATCH_BYTES))
    given = _storage(BATCH_BYTES + 3)
    followed = There({given._cdata: given}, inputs=[given._cdata], is_whole=False)
    assert external.baseline_bytes(followed, (), has_inputs=True) == 3


def test_the_allocators_figure_says_the_same() -> None:
    """In what it has handed out."""
    weight, batch = _storage(WEIGHT_BYTES), _storage(BATCH_BYTES)
    external = _external(weight, batch)
    held_bytes = 512 + 512 + OTHER_BYTES

    def taken(num_bytes: int) -> int:
        return -(-num_bytes // 512) * 512

    assert external.baseline_bytes_of(held_bytes, taken, has_inputs=True) == OTHER_BYTES
    del batch
    assert external.baseline_bytes_of(held_bytes, taken, has_inputs=False) == OTHER_BYTES + 512


def test_nothing_is_told_of_what_was_not_looked_at() -> None:
    """Before the first recorded step."""
    assert ExternalStorages().now() == set()
    assert ExternalStorages().baseline_bytes(There({}), (), has_inputs=True) is None
    assert ExternalStorages().baseline_bytes_of(10, int, has_inputs=True) is None

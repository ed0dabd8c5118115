"""The comparison itself: it notices a single wrong bit, policies do what they say, and no op is left out of a share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_offload import MemoryPlugin
from lightning_offload.runtime.materialize import Materializer
from tests.catalogue.samples import Entry, function_entries, module_entries, op_entries, samples_of, share_of
from tests.catalogue.steps import check, run_steps
from tests.shares import VARIABLE


def _entry(name: str) -> Entry:
    return next(entry for entry in op_entries() if entry.name == name)


@pytest.mark.parametrize("name", ["mul-float32", "sin-complex64", "nn.functional.softplus-float64"])
def test_a_wrong_bit_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit that is turned in one tensor on its way back fails the check."""
    read, num_read = Materializer.read, 0

    def turned(self: Materializer, *args: Any) -> torch.UntypedStorage:
        nonlocal num_read
        storage, num_read = read(self, *args), num_read + 1
        if num_read == 3:
            storage[3] = int(storage[3]) ^ 0x40
        return storage

    entry = _entry(name)
    check(entry)
    monkeypatch.setattr(Materializer, "read", turned)
    with pytest.raises(AssertionError, match="differ"):
        check(entry)
    assert num_read >= 3


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_plans_are_in_force(policy: str) -> None:
    """The last of the steps runs under a plan that swaps, or recomputes, what the op saves."""
    memory = MemoryPlugin(policy=policy)
    sample = samples_of(_entry("mul-float32"))[0]
    run_steps(sample, memory)
    report = memory.report()
    assert report.phase == "planned"
    assert (report.swapped_bytes if policy == "all-swap" else report.recomputed_bytes) > 0


def test_a_share_has_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share has one entry of each op, function and module, the same in every run, and one sample of each."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for entries in (op_entries(), function_entries(), module_entries()):
        share = share_of(entries)
        assert {entry.family for entry in share} == {entry.family for entry in entries}
        assert len({entry.family for entry in share}) == len(share)
        assert [entry.name for entry in share] == [entry.name for entry in share_of(entries)]
        assert len({entry.name for entry in entries}) == len(entries)
    assert len(samples_of(_entry("mul-float32"))) == 1
    monkeypatch.setenv(VARIABLE, "all")
    assert len(samples_of(_entry("mul-float32"))) > 1
    assert share_of(function_entries()) != []

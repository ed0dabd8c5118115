"""Paths that the documentation once named still lead to what they did."""

from __future__ import annotations

import importlib

import pytest

MOVED = {
    "lightning_offload.planning.policies.plan": "lightning_offload.planning.planner.plan",
    "lightning_offload.planning.policies.POLICIES": "lightning_offload.planning.planner.POLICIES",
    "lightning_offload.planning.spans.follow": "lightning_offload.planning.trace.follow",
    "lightning_offload.plugins.report_data.Report": "lightning_offload.plugins.report.Report",
    "lightning_offload.plugins.efficient_batch_size.find_efficient_batch_size": (
        "lightning_offload.tuning.function.find_efficient_batch_size"
    ),
}


def _at(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("old", MOVED)
def test_old_path_leads_to_the_same_object(old: str) -> None:
    """By an alias of one line."""
    assert _at(old) is _at(MOVED[old])


def test_a_name_that_never_was_there_is_told_as_usual() -> None:
    """The package that looks aliases up does not hide a mistake."""
    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        _at("lightning_offload.planning.policies.plam")

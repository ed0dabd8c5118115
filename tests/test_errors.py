"""The exception tree: one base, built-in parents, messages that name the fix."""

from __future__ import annotations

import pickle

import pytest

from lightning_offload import errors

PARENTS = {
    "BudgetError": ValueError,
    "BudgetInfeasibleError": errors.BudgetError,
    "PolicyError": ValueError,
    "PlanError": ValueError,
    "StaleInputError": RuntimeError,
    "TuningError": ValueError,
    "ReplayError": RuntimeError,
    "ReportFileError": OSError,
    "SpillError": OSError,
    "UnsupportedError": RuntimeError,
}


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "OffloadError"])
def test_every_error_is_an_offload_error_and_a_builtin_one(name: str) -> None:
    """One except clause catches all of ours, and code that knows only built-ins catches each."""
    error = getattr(errors, name)
    assert issubclass(error, errors.OffloadError)
    assert issubclass(error, PARENTS[name])


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_drawn_in_the_tree(name: str) -> None:
    """The tree in the module's docstring lists each exception that exists."""
    assert f" {name}" in (errors.__doc__ or "")


def test_infeasible_carries_budget_floor_and_op() -> None:
    """A program can read the smallest feasible budget from the error, and try again with it."""
    error = errors.BudgetInfeasibleError("too small", budget_bytes=5, floor_bytes=9, op="conv3 (backward)")
    assert (error.budget_bytes, error.floor_bytes, error.op) == (5, 9, "conv3 (backward)")
    assert str(error) == "too small"


def test_infeasible_survives_pickling() -> None:
    """The error can cross a process boundary, as it does when a worker of a parallel run fails."""
    error = errors.BudgetInfeasibleError("too small", budget_bytes=5, floor_bytes=9, op="relu")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.BudgetInfeasibleError
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_spill_error_keeps_errno() -> None:
    """A full disk stays recognisable by its error number."""
    assert errors.SpillError(28, "No space left on device").errno == 28


def test_an_object_is_named_with_its_article() -> None:
    """For messages."""
    assert [errors.type_of(item) for item in (3, "three", [], None)] == ["an int", "a str", "a list", "a NoneType"]


def test_keywords_are_checked_for_who_hands_them_on() -> None:
    """The error names what the user wrote, and what is near it, or all that there is."""
    errors.check_keywords("prepare", ["budget"], {"budget", "keep"})
    with pytest.raises(
        TypeError, match=r"^prepare\(\) got an unexpected keyword argument 'bugdet': did you mean 'budget'"
    ):
        errors.check_keywords("prepare", ["budget", "bugdet"], {"budget", "keep"})
    with pytest.raises(TypeError, match="it takes budget, keep"):
        errors.check_keywords("prepare", ["x"], {"budget", "keep"})

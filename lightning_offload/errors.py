"""Every exception that lightning-offload raises on purpose.

Our exceptions:

* OffloadError
  x BudgetError (ValueError)                 a budget that cannot be read, or that means two things
    + BudgetInfeasibleError                  a budget below the smallest one that works
  x PolicyError (ValueError)                 a policy, tier, verify mode or engine that is none
  x PlanError (ValueError)                   a plan or graph that is malformed, or that is another model's
  x StaleInputError (RuntimeError)           a value needed for a recomputation was written meanwhile
  x ReplayError (RuntimeError)               a recomputation did not run, or gave something else
  x SpillError (OSError)                     the host or disk tier could not store or return bytes
  x ReportFileError (OSError)                a report that cannot be written where it should go
  x TuningError (ValueError)                 a tuner that was given nothing it can tune
  x UnsupportedError (RuntimeError)          a combination that is not supported, or a missing extra

Each also derives from the built-in exception in brackets, so code that knows nothing of this package can
catch it. A message echoes the value, says what is allowed and says the fix. :func:`type_of` and
:func:`check_keywords` help to write it.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BudgetError",
    "BudgetInfeasibleError",
    "OffloadError",
    "PlanError",
    "PolicyError",
    "ReplayError",
    "ReportFileError",
    "SpillError",
    "StaleInputError",
    "TuningError",
    "UnsupportedError",
]


class OffloadError(Exception):
    """Base of every exception that this package raises on purpose."""


class BudgetError(OffloadError, ValueError):
    """A budget is malformed, ambiguous, not positive, or a fraction of an unknown device."""


class BudgetInfeasibleError(BudgetError):
    """No plan keeps the step within the budget.

    Args:
        message: What to tell the user: both sizes, where the floor is set, and what to do.
        budget_bytes: The budget that was asked for.
        floor_bytes: The smallest budget that works; giving exactly this one succeeds.
        op: Where that floor is set, for example ``"layer4.2.conv3 (backward)"``.
    """

    def __init__(self, message: str, *, budget_bytes: int, floor_bytes: int, op: str) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.op = op

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the keywords, which an exception's own pickling leaves out."""
        rebuild = functools.partial(
            type(self), budget_bytes=self.budget_bytes, floor_bytes=self.floor_bytes, op=self.op
        )
        return rebuild, self.args, self.__dict__


class PolicyError(OffloadError, ValueError):
    """A policy, tier, verify mode or engine is not one of those that exist."""


class PlanError(OffloadError, ValueError):
    """A plan or graph file is malformed, or belongs to another model."""


class StaleInputError(OffloadError, RuntimeError):
    """A tensor that a recomputation reads was written between forward and backward."""


class ReplayError(OffloadError, RuntimeError):
    """Replaying recorded ops failed or did not give the recorded result."""


class SpillError(OffloadError, OSError):
    """The host or disk tier could not store or return a tensor."""


class ReportFileError(OffloadError, OSError):
    """A report cannot be written where it was asked for."""


class TuningError(OffloadError, ValueError):
    """There is nothing to tune: an attribute that does not exist, sizes that leave no choice, no size that fits."""


class UnsupportedError(OffloadError, RuntimeError):
    """The combination asked for is not supported, or needs an extra that is not installed."""


def type_of(item: object) -> str:
    """An object's type with its article, for messages.

    >>> type_of(3), type_of("three")
    ('an int', 'a str')
    """
    name = type(item).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def check_keywords(name: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Check the keywords of something that hands them on, so that the error names what the user wrote.

    Args:
        name: What the user called.
        given: The keywords.
        allowed: Those that there are.

    Raises:
        TypeError: There is none of a name, as Python says it.
    """
    known = sorted(allowed)
    for keyword in given:
        if keyword not in known:
            close = difflib.get_close_matches(keyword, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}: {hint}")

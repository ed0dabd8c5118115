"""A linear program that is written row by row, and a lower bound on its optimum that rounding cannot spoil.

A solver stops when rows hold within a tolerance, so the value that it reports may lie above the true optimum. The
value returned here is not the solver's: it is computed from its dual solution ``y`` as
``y b + sum over x_j in [l_j, u_j] of min (c - y A)_j x_j``, which by weak duality is a lower bound for *any* y of the
right sign (Neumaier and Shcherbina, Mathematical Programming 2004). Every variable must have finite limits for that.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_MIN_STEPS = 10_000  # of the solver, however large the program is
_MAX_WORK = 3e10  # steps of the simplex method times columns and coefficients: about half a minute

_log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]
Columns = list[int]
Terms = list[tuple[int, float]]
"""Columns with their coefficients; a column may come more than once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An optimum.

    Attributes:
        value: A lower bound on the objective, within rounding of it.
        x: The variables.
    """

    value: float
    x: Floats


class LinearProgram:
    """Minimises a cost over variables within limits, under rows of the form ``sum of coefficient * x <= limit``."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._integral: list[bool] = []
        self._rows = _Rows()
        self._equal = _Rows()

    def variables(
        self, upper: Sequence[float], *, cost: Sequence[float] | float = 0.0, integral: bool = False
    ) -> Columns:
        """New variables from 0 up to limits; their columns."""
        first = len(self._cost)
        self._upper += [float(u) for u in upper]
        self._lower += [0.0] * len(upper)
        self._cost += [float(cost)] * len(upper) if isinstance(cost, (int, float)) else [float(c) for c in cost]
        self._integral += [integral] * len(upper)
        return list(range(first, len(self._cost)))

    def at_most(self, terms: Sequence[tuple[int, float]], limit: float) -> None:
        """A row: the sum of coefficient times variable is at most a limit."""
        self._rows.add(terms, limit)

    def equals(self, terms: Sequence[tuple[int, float]], value: float) -> None:
        """A row: the sum of coefficient times variable is a value."""
        self._equal.add(terms, value)

    def fix(self, column: int, value: float) -> None:
        """Fix a variable."""
        self._lower[column] = self._upper[column] = value

    def solve(self, seconds: float | None) -> Solution | None:
        """Solve with HiGHS.

        Args:
            seconds: Time limit; None to limit the number of steps by the size of the program, so that what is found
                does not depend on the machine.

        Returns:
            None where it found no optimum within the limit.
        """
        from scipy.optimize import linprog

        num = len(self._cost)
        rows, limits = self._rows.matrix(num)
        equal, values = self._equal.matrix(num)
        cost, lower, upper = np.array(self._cost), np.array(self._lower), np.array(self._upper)
        options: dict[str, Any] = {"presolve": True}
        if seconds is not None:
            options["time_limit"] = max(seconds, 1e-3)
        else:
            options["maxiter"] = max(_MIN_STEPS, int(_MAX_WORK / (num + self._rows.num_nonzeros)))
        bounds = np.column_stack((lower, upper))
        try:
            found = linprog(cost, rows, limits, equal, values, bounds=bounds, method="highs", options=options)
        except (ArithmeticError, RuntimeError, ValueError) as error:
            _log.warning("HiGHS failed, a cheaper bound is used: %s", error)
            return None
        if found.status != 0 or not np.isfinite(found.x).all():
            return None
        dual = np.minimum(found.ineqlin.marginals, 0.0)
        reduced = cost.copy()
        value = 0.0
        if rows is not None:
            reduced -= rows.T @ dual
            value += float(dual @ limits)
        if equal is not None:
            reduced -= equal.T @ found.eqlin.marginals
            value += float(found.eqlin.marginals @ values)
        value += float(np.minimum(reduced * lower, reduced * upper).sum())
        return Solution(value=value, x=found.x)

    def solve_integral(self, *, max_nodes: int) -> float | None:
        """A lower bound on the optimum with the variables that were declared integral being so, by branch and bound.

        Args:
            max_nodes: Where to stop, with the bound so far; a number, so that it does not depend on the machine.

        Returns:
            The solver's lower bound, which is the optimum if it came to an end; None where it has none.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        num = len(self._cost)
        constraints = []
        rows, limits = self._rows.matrix(num)
        if rows is not None:
            constraints.append(LinearConstraint(rows, -np.inf, limits))
        equal, values = self._equal.matrix(num)
        if equal is not None:
            constraints.append(LinearConstraint(equal, values, values))
        found = milp(
            np.array(self._cost), integrality=np.array(self._integral, dtype=np.int64), constraints=constraints,
            bounds=Bounds(np.array(self._lower), np.array(self._upper)),
            options={"node_limit": max_nodes, "mip_rel_gap": 1e-4},
        )  # fmt: skip
        return None if found.mip_dual_bound is None else float(found.mip_dual_bound)


class _Rows:
    def __init__(self) -> None:
        self._index: list[int] = []
        self._begin: list[int] = [0]
        self._coefficients: list[float] = []
        self._limits: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], limit: float) -> None:
        for column, coefficient in terms:
            self._index.append(column)
            self._coefficients.append(coefficient)
        self._begin.append(len(self._index))
        self._limits.append(limit)

    @property
    def num_nonzeros(self) -> int:
        """Coefficients so far."""
        return len(self._index)

    def matrix(self, num_columns: int) -> tuple[Any, Any]:
        from scipy.sparse import csr_array

        if not self._limits:
            return None, None
        shape = (len(self._limits), num_columns)
        rows = csr_array((np.array(self._coefficients), np.array(self._index), np.array(self._begin)), shape=shape)
        rows.sum_duplicates()
        return rows, np.array(self._limits)


def scaled(terms: Sequence[tuple[int, float]], factor: float) -> Terms:
    """Terms times a factor."""
    return [(column, factor * coefficient) for column, coefficient in terms]

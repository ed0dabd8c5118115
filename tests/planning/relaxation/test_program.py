"""Linear programs with known optima, and the value that rounding cannot spoil."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_offload.planning.relaxation.program import LinearProgram, scaled


def knapsack_program(*, integral: bool) -> LinearProgram:
    """Give up value 6, 5 and 4 for sizes 4, 3 and 2, of which at least 5 must go."""
    program = LinearProgram()
    x = program.variables([1.0, 1.0, 1.0], cost=[6.0, 5.0, 4.0], integral=integral)
    program.at_most([(x[0], -4.0), (x[1], -3.0), (x[2], -2.0)], -5.0)
    return program


def test_optimum_of_fractions() -> None:
    """The cheapest by size, 6 for 4, is taken whole, and a third of the next one."""
    solution = knapsack_program(integral=False).solve(10.0)
    assert solution is not None
    assert solution.value == pytest.approx(6 + 5 / 3)
    assert solution.x == pytest.approx([1, 1 / 3, 0])


def test_optimum_of_wholes() -> None:
    """Without fractions the second and the third are best."""
    assert knapsack_program(integral=True).solve_integral(max_nodes=10_000) == pytest.approx(9.0)


def test_fixed_variables_stay() -> None:
    """A variable that is fixed takes that value."""
    program = knapsack_program(integral=False)
    program.fix(0, 0.0)
    solution = program.solve(10.0)
    assert solution is not None
    assert solution.x == pytest.approx([0, 1, 1])


def test_what_has_no_solution_gives_none() -> None:
    """Rows that contradict each other have no bound."""
    program = LinearProgram()
    x = program.variables([1.0])
    program.equals([(x[0], 1.0)], 2.0)
    assert program.solve(10.0) is None


def test_columns_may_come_twice_in_a_row() -> None:
    """Coefficients of one column add up."""
    program = LinearProgram()
    x = program.variables([10.0], cost=-1.0)
    program.at_most([(x[0], 1.0), *scaled([(x[0], 1.0)], 3.0)], 8.0)
    solution = program.solve(10.0)
    assert solution is not None
    assert solution.value == pytest.approx(-2.0)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_value_is_below_every_point(seed: int) -> None:
    """The value is a lower bound on the objective of any point that meets the rows."""
    rng = np.random.default_rng(seed)
    count, rows = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    cost, matrix = rng.normal(size=count), rng.normal(size=(rows, count))
    point = rng.uniform(0, 1, size=count)
    program = LinearProgram()
    x = program.variables([1.0] * count, cost=cost.tolist())
    for row in matrix:
        program.at_most(list(zip(x, row.tolist(), strict=True)), float(row @ point))
    solution = program.solve(10.0)
    assert solution is not None
    assert solution.value <= cost @ point + 1e-12
    assert solution.value == pytest.approx(cost @ solution.x, abs=1e-6)

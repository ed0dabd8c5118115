"""A linear relaxation of planning: a lower bound on the step time of every plan, and where a good one lies.

A plan says keep, swap or recompute for each candidate storage, what is memoised, and when copies are made; the
program allows fractions of those actions, and only knows consequences that every plan has. Any plan that fits the
budget and the tiers is a point of the program whose objective is at most the plan's simulated step time, so the
optimum is a lower bound: ``relax(...).seconds <= simulate(...).step_seconds`` of each of them.

Proof idea, row by row, for a plan with swapped storages S, recomputed ones R, and ``T(t)`` the time at which tick
``t`` starts, waits at that tick included:

*Memory.* Plain memory at ``t`` exceeds the budget by some bytes, and nothing but an absent storage of S or R makes
up for that: one that is dead, and that backward has not yet read since (a storage that it has read stays until
autograd drops it, memoised or not). What replays hold on top only adds memory.

*Copies.* A storage of S that is absent at ``t`` was copied out between its pack and ``T(t)``, and its copy back lies
between the first unpack after ``t``, where it can be issued at the earliest, and its first read. Copies of one
direction take the lane one after another, so over any stretch of time they fit its rate; the stretch is its plain
time plus the replays and stalls in it, which are variables and cost what they are. The bytes not yet out and those
back early are on the device. :mod:`.buffers` adds that a storage is there as a whole while its copy is under way.

*Replays.* A storage of R that backward reads when dead was replayed at that read or before it, with its producer and
all ops behind that up to saved values (:mod:`.facts`). Ops that several replays share count once for each that happens
at its own read, and at least once. Overhead is paid at each such read; a storage can avoid it only by being made
on the way to another one, which takes that one to be recomputed and puts it on the device from there on. One that is
not on the device at a tick is replayed there or later. By when it may be back is told apart at the first tick at which
any replay may make it, over however many links, and at the reads of those whose replay reads it; from each of these to
the next tick at which any may, it is known not to have come.

*Inputs of replays.* If a replayed storage reads a saved one that is dead, that one is on the device from the replay
on (kept, swapped back, or memoised), or it was made and dropped and is made again for its own read, at its cost. So it
is where the storage is made on the way to another one. A swapped one is not fetched for it where the same replay runs
its producer anyhow, for another output that is recomputed or not saved.

A value that such a replay makes while the program still holds it is never absent; in the program it is a kept one.

*Compute* loses the device's ``copy_interference`` share of the copies' time over the link, except where it waits.

*Tiers.* What is swapped to a limited host fits it while autograd holds it. Where there is a disk, the rest takes its
lane. If the program holds no plan for a budget (or the solver fails), the bound of :mod:`.knapsack` is returned.

Rounding cannot spoil it: the value is the dual one (:mod:`.program`). The solver need not see every tick: fewer
rows make a lower bound lower. Ticks where the solution exceeds the budget are added for a few rounds.

Known looseness: a storage may leave in part; replays may be placed in time where they help copies most, as far as their
inputs and results have room there; a value that is replayed more than twice counts twice; a replay's own transient
memory is left out, and so is an input that is held beyond its own last read; what the disk's lane and the link do to
one another is left out. Since the ticks depend on the budget, the bound may rise by a hair when the budget does, on
steps with more ticks than the program takes.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Collection, Mapping

import numpy as np

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.relaxation.facts import Case
from lightning_offload.planning.relaxation.knapsack import knapsack, least_seconds
from lightning_offload.planning.relaxation.model import Model
from lightning_offload.planning.relaxation.program import Floats
from lightning_offload.planning.simulator import Timeline, simulate

MAX_ITEMS = 3000  # storages; of more a thin program is solved, for its bound
_MAX_TICKS = 160  # of the grid, where memory is limited, and as many where copies are counted
_MANY_ITEMS = 256  # storages
_FEW_TICKS = 96  # the same for so many items: a third of the time, for a bound that is lower by 0.2% at most
_MAX_ROUNDS = 4  # in which ticks are added where the solution is above the budget
_MAX_THIN_TICKS = 24  # the same for a thin program
_CLEAR = 1e-6  # fractions below it are the solver's tolerance
_ROUNDING = 1e-9  # relative, of float64 sums
_TOLERANCE = 1e-4  # share of the largest excess by which a solution may exceed the budget at other ticks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The solution of a relaxed planning problem.

    Attributes:
        seconds: Lower bound on the step time.
        swap: By storage: the fraction that is swapped; those with none are left out.
        recompute: The same for recomputed ones.
        method: How it was found: "plain" where everything fits, "linear program", "thin linear program" for large
            steps, or "knapsack".
    """

    seconds: float
    swap: Mapping[int, float]
    recompute: Mapping[int, float]
    method: str


def relax(
    problem: Problem,
    device: DeviceSpec,
    budget_bytes: int | None,
    *,
    seconds: float | None = None,
    no_recompute: Collection[int] = (),
) -> Relaxation:
    """Relax planning within a budget.

    Args:
        problem: The step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        seconds: Time to spend, beyond which the cheaper bound is taken. By default effort is limited by the size of
            the program alone, so that the result does not depend on the machine.
        no_recompute: Storages that may not be recomputed; with any, the result bounds only plans that do not.
    """
    deadline = None if seconds is None else time.perf_counter() + seconds
    plain = simulate(problem, {}, device)
    if budget_bytes is None or plain.peak_bytes <= budget_bytes:
        return Relaxation(seconds=plain.step_seconds, swap={}, recompute={}, method="plain")
    case = Case.of(problem, device, plain, budget_bytes, no_recompute)
    bound, swap, recompute = knapsack(case)
    cheap = Relaxation(seconds=bound, swap=swap, recompute=recompute, method="knapsack")
    found = _solve(case, deadline, is_thin=len(case.items) > MAX_ITEMS)
    if found is None or found.seconds < cheap.seconds * (1 - _ROUNDING):
        return cheap
    return dataclasses.replace(found, seconds=max(found.seconds, cheap.seconds))


def bound_of_action(problem: Problem, device: DeviceSpec, plain: Timeline, budget_bytes: int, action: Action) -> float:
    """A lower bound on the step time of every plan that takes one action alone, made without a linear program.

    Args:
        problem: The step.
        device: Where it runs.
        plain: The step with everything kept.
        budget_bytes: Peak of live device bytes allowed.
        action: "swap" or "recompute"; what is neither is kept.

    Returns:
        Seconds; infinite where no such plan fits the budget.
    """
    if plain.peak_bytes <= budget_bytes:
        return plain.step_seconds
    return least_seconds(Case.of(problem, device, plain, budget_bytes), action)


def integral_bound(problem: Problem, device: DeviceSpec, budget_bytes: int, *, max_nodes: int) -> float | None:
    """A lower bound that is higher: the same program, in which no storage leaves in part, by branch and bound.

    Takes minutes where there are more than some dozens of candidates. Unlike that of :func:`relax` it is the solver's
    own figure, so it holds to the solver's tolerance.

    Args:
        problem: The step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, below the plain one.
        max_nodes: Where to stop, with the bound so far.

    Returns:
        Seconds; None where the solver has none.
    """
    case = Case.of(problem, device, simulate(problem, {}, device), budget_bytes)
    ticks = _memory_ticks(case, _MAX_TICKS) | _clock_ticks(case, _MAX_TICKS)
    model = Model(case, sorted(ticks), integral=True)
    value = model.program.solve_integral(max_nodes=max_nodes)
    return None if value is None else model.seconds(value)


def _solve(case: Case, deadline: float | None, *, is_thin: bool) -> Relaxation | None:
    """Solve, adding ticks where the solution exceeds the budget, until there are none."""
    most = _MAX_THIN_TICKS if is_thin else _FEW_TICKS if len(case.items) > _MANY_ITEMS else _MAX_TICKS
    ticks, clock = _memory_ticks(case, most), _clock_ticks(case, most)
    best: Relaxation | None = None
    for _ in range(1 if is_thin else _MAX_ROUNDS):
        model = Model(case, sorted({*ticks, *clock}), is_thin=is_thin)
        solution = model.solve(None if deadline is None else deadline - time.perf_counter())
        if solution is None:
            return best
        found = Relaxation(
            seconds=model.seconds(solution.value),
            swap=_fractions(case, solution.x[model.swap]),
            recompute=_fractions(case, solution.x[model.recompute]),
            method="thin linear program" if is_thin else "linear program",
        )
        best = found if best is None or found.seconds > best.seconds else best
        more = set(_exceeded(case, model.absence(solution.x))) - set(ticks)
        if not more:
            break
        ticks |= more
    return best


def _fractions(case: Case, x: Floats) -> dict[int, float]:
    return {
        item.candidate.storage: min(1.0, float(share))
        for item, share in zip(case.items, x, strict=True)
        if share > _CLEAR
    }


def _memory_ticks(case: Case, most: int) -> set[int]:
    """Ticks with the largest excess between any two changes of what can be absent, thinned out to a number."""
    edges = {e for item in case.items for e in (item.candidate.death, item.until)} | {0, len(case.excess)}
    borders = sorted(edges)
    peaks: list[int] = []
    for begin, end in itertools.pairwise(borders):
        if begin < end:
            peaks.append(begin + int(np.argmax(case.excess[begin:end])))
    peaks = [t for t in peaks if case.excess[t] > 0]
    if len(peaks) > most:
        groups = np.array_split(np.array(peaks), most)
        peaks = [int(group[np.argmax(case.excess[group])]) for group in groups]
    return set(peaks)


def _clock_ticks(case: Case, most: int) -> set[int]:
    """Ticks that part the step into equal times, where copies are counted."""
    ticks = np.unique([t for item in case.items for t in (item.candidate.pack_tick, item.candidate.death, item.until)])
    ticks = ticks[ticks < len(case.excess)]
    if len(ticks) > most:
        wanted = np.linspace(case.starts[0], case.starts[-1], most)
        ticks = ticks[np.unique(np.searchsorted(case.starts[ticks], wanted).clip(0, len(ticks) - 1))]
    return {int(t) for t in ticks}


def _exceeded(case: Case, absent: Floats) -> list[int]:
    """Where the absent bytes do not make up for the excess: the worst tick of each stretch, the worst stretch first."""
    short: Floats = case.excess - absent
    over = np.flatnonzero((short > _TOLERANCE * max(1, int(case.excess.max()))) & (case.excess > 0))
    stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1) if len(over) else []
    worst = [int(part[np.argmax(short[part])]) for part in stretches]
    return sorted(worst, key=lambda t: -short[t])[:_MAX_TICKS]

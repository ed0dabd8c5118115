"""Prints how the budget's promise is kept, one line for each case and budget; for diagnosis.

python -m tests.engine.sweep                    # every case, 40 budgets each
python -m tests.engine.sweep sam ema -n 4       # two cases, four budgets each
python -m tests.engine.sweep sam --height 0.3   # one budget
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

from lightning_offload import MemoryPlugin
from lightning_offload.capture.live import LiveScanClock
from lightning_offload.errors import BudgetInfeasibleError
from tests.engine.census import KIB, CensusTracker, describe
from tests.engine.promise import NUM_HEIGHTS, Verdict, heights, probe, train, try_budget
from tests.zoo.cases_loops import LOOPS_BY_NAME

MIB = 1 << 20
RETRY_EVERY = 8
"""One in so many budgets is tried again at the budget that the error names."""

HEADER = "case              height  budget  true/budget  measured/true  predicted/true  phase      what"


def main() -> None:
    """Try each budget of each case, and count what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(LOOPS_BY_NAME)}")
    parser.add_argument("-n", type=int, default=NUM_HEIGHTS, help="how many budgets, equally spaced")
    parser.add_argument("--height", type=float, action="append", help="of a budget, from floor (0) to plain peak (1)")
    parser.add_argument("--why", action="store_true", help="tell what was alive at the highest peak, by who made it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    LiveScanClock.is_due = lambda clock, share: True  # type: ignore[method-assign]  # the promise is about what is seen
    os.environ["LIGHTNING_OFFLOAD_CACHE"] = ""
    chosen = options.height or heights(options.n)
    if options.why:
        for name in options.cases:
            for height in chosen:
                explain(name, height)
        return
    _say(HEADER)
    totals = [sweep(name, chosen) for name in options.cases or LOOPS_BY_NAME]
    _say("\ncase              budgets  failed  over  worst  refused  figure  other  cpu")
    _say("\n".join(line for line, _ in totals))
    sys.exit(any(num_failed for _, num_failed in totals))


def explain(name: str, height: float) -> None:
    """Print what was alive at the highest peak of a case within a budget."""
    case, budget_bytes, tracker = LOOPS_BY_NAME[name], probe(name).budget(height), CensusTracker()
    training = train(case, MemoryPlugin(budget=budget_bytes), tracker=tracker)
    step, report = training.highest, training.report
    _say(f"{name} at {height}: {training.error or 'no error'}")
    if step is None or report is None:
        return
    kib = {
        "budget": budget_bytes,
        "true peak": step.window.peak_bytes,
        "in forward": step.forward_peak_bytes,
        "in backward": step.backward_peak_bytes,
        "predicted": report.predicted_peak_bytes,
        "measured last": report.measured_peak_bytes,
        "of forward": report.forward_peak_bytes,
        "of backward": report.backward_peak_bytes,
    }
    _say("KiB: " + ", ".join(f"{what} {(num_bytes or 0) / KIB:.1f}" for what, num_bytes in kib.items()))
    _say(f"step {step.number} of its kind, at {step.window.peak_op}, phase {report.phase}")
    _say(describe(tracker.census_of(step.window)))


def sweep(name: str, chosen: list[float]) -> tuple[str, int]:
    """Try the budgets of a case, print a line for each, and return one about all of them and how many failed."""
    start = time.process_time()
    found = probe(name)
    _say(
        f"{name:16}  floor {found.floor_bytes / MIB:.2f} MiB, plain peak {found.plain_peak_bytes / MIB:.2f} MiB, "
        f"as reported {found.reported_plain_peak_bytes / MIB:.2f}; probed in {time.process_time() - start:.1f} s"
    )
    verdicts = []
    for number, height in enumerate(chosen):
        verdict = try_budget(name, height, retry=number % RETRY_EVERY == 0)
        verdicts.append(verdict)
        _say(f"{name:16}  {_line(verdict)}")
    num_failed = sum(bool(verdict.failures) for verdict in verdicts)
    return f"{name:16}  {_total(verdicts)}  {time.process_time() - start:.0f} s", num_failed


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _line(verdict: Verdict) -> str:
    step, report = verdict.training.highest, verdict.training.report
    true = step.window.peak_bytes if step is not None else 0
    measured = (report.measured_peak_bytes or 0) if report is not None else 0
    predicted = (report.predicted_peak_bytes or 0) if report is not None else 0
    ratios = (true / verdict.budget_bytes, measured / true if true else 0.0, predicted / true if true else 0.0)
    phase = report.phase if report is not None else ""
    what = "; ".join(verdict.failures) or _excuse(verdict)
    return (
        f"{verdict.height:6.3f}  {verdict.budget_bytes / MIB:6.2f}  {ratios[0]:11.3f}  {ratios[1]:13.3f}  "
        f"{ratios[2]:14.3f}  {phase:9}  {what}"
    )


def _excuse(verdict: Verdict) -> str:
    error = verdict.training.error
    if isinstance(error, BudgetInfeasibleError):
        after = verdict.training.steps[-1].number if verdict.training.steps else 0
        return f"infeasible after {after} steps, needs {error.floor_bytes / MIB:.2f}"
    return "ok"


def _total(verdicts: list[Verdict]) -> str:
    failures = [failure for verdict in verdicts for failure in verdict.failures]
    kinds = [failure.partition(":")[0] for failure in failures]
    worst = max(
        (v.training.highest.window.peak_bytes / v.budget_bytes for v in verdicts if v.training.highest is not None),
        default=0.0,
    )
    refused = sum(isinstance(verdict.training.error, BudgetInfeasibleError) for verdict in verdicts)
    num_failed = sum(bool(verdict.failures) for verdict in verdicts)
    others = len([kind for kind in kinds if kind not in ("over", "figure")])
    return (
        f"{len(verdicts):7}  {num_failed:6}  {kinds.count('over'):4}  {worst:5.3f}  {refused:7}  "
        f"{kinds.count('figure'):6}  {others:5}"
    )


if __name__ == "__main__":
    main()

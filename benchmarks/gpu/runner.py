"""Runs cases in order of value until the minutes are over, and keeps at once what each of them gave.

No case is started that is not expected to end in time, and what still runs at the limit is stopped; both are
left for the next run. A case that fails is kept as an error and tried again last. A case that was measured is
not measured again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from benchmarks.gpu.cases import Case, Search
from benchmarks.gpu.process import Ended, Job, launch
from benchmarks.gpu.search import BatchSearch, Trial
from benchmarks.gpu.store import CaseResult, Store, failed
from benchmarks.results import Measurements, Row
from benchmarks.tables import format_value

_PATIENCE = 3.0
_MIN_TIMEOUT_SECONDS = 60.0
_QUICK_TIMEOUT_SECONDS = 240.0  # tiny cases measure nothing: how long they take is the machine's affair
_QUICK_SECONDS = 8.0

Launch = Callable[[Job, float], Ended]


@dataclass(slots=True, kw_only=True)
class Runner:
    """One call of the suite.

    Attributes:
        store: Where results go.
        quick: Whether sizes are tiny, and so are the times that cases are expected to take.
        seconds: The limit on the whole.
        launch: Runs a job.
        clock: Tells the time in seconds.
        unfinished: Keys of cases that the limit left for another run.
    """

    store: Store
    quick: bool
    seconds: float
    launch: Launch = launch
    clock: Callable[[], float] = time.monotonic
    unfinished: list[str] = field(default_factory=list)
    _start: float = 0.0

    def run(self, cases: Sequence[Case]) -> None:
        """Run what was not measured yet."""
        self._start = self.clock()
        known = self.store.results
        todo = [case for case in cases if case.key not in known]
        todo += [case for case in cases if case.key in known and known[case.key].state == "error"]
        for case in todo:
            if self._expected_seconds(case) > self._remaining():
                self._say(f"{case.key}: left for another run, {self._remaining():.0f} s are too little")
                self.unfinished.append(case.key)
                continue
            self._say(f"{case.key} ...")
            ended = self._search(case, case.search) if case.search is not None else self._launch(case.job, case)
            self._take(case, ended)

    def _remaining(self) -> float:
        return self.seconds - (self.clock() - self._start)

    def _expected_seconds(self, case: Case) -> float:
        return min(case.seconds, _QUICK_SECONDS) if self.quick else case.seconds

    def _launch(self, job: Job, case: Case) -> Ended:
        """Run a job of a case on the device; one that outstays its own time has failed."""
        least = _QUICK_TIMEOUT_SECONDS if self.quick else _MIN_TIMEOUT_SECONDS
        own = max(_PATIENCE * self._expected_seconds(case), least)
        remaining = self._remaining()
        ended = self.launch(job, max(0.0, min(own, remaining)))
        if ended.state == "stopped" and own < remaining:
            return Ended(state="error", message=f"took longer than {own:.0f} s", log=ended.log, seconds=ended.seconds)
        return ended

    def _take(self, case: Case, ended: Ended) -> None:
        """Keep what a case gave."""
        commit = self.store.environment["commit"]
        if ended.state == "done":
            measured = Measurements(**{**ended.content, "rows": [Row(**row) for row in ended.content["rows"]]})
            result = CaseResult(state="done", seconds=ended.seconds, commit=commit, measured=measured)
        elif ended.state == "error":
            result = failed(case.title, ended.message, seconds=ended.seconds, commit=commit)
        else:
            self.unfinished.append(case.key)
            self._say(f"{case.key}: {ended.message}: the minutes are over")
            return
        self.store.put(case.key, result)
        self._say(f"{case.key}: {ended.state} after {ended.seconds:.0f} s {ended.message}")
        for line in _summary(result.measured):
            self._say(f"    {line}")
        if ended.log and result.measured.notes:
            print(ended.log, file=sys.stderr, flush=True)

    def _search(self, case: Case, search: Search) -> Ended:
        """Try one size after the other, each in its own process."""
        known = {int(size): Trial.of(outcome) for size, outcome in self.store.trials.get(case.key, {}).items()}
        state = BatchSearch(cap_bytes=search.limit_bytes, first=search.first, trials=known)
        seconds = 0.0
        while (size := state.next()) is not None:
            if self._expected_seconds(case) > self._remaining():
                return Ended(state="stopped", message=f"{len(state.trials)} trials so far", seconds=seconds)
            ended = self._launch(search.job(case.job, size), case)
            seconds += ended.seconds
            if ended.state != "done":
                return ended
            self._say(f"{case.key}: {size} {'fits' if ended.content['fits'] else 'does not fit'}")
            state.trials[size] = Trial.of(ended.content)
            self.store.put_trial(case.key, size, ended.content)
        return Ended(state="done", content=self._search_content(case, search, state), seconds=seconds)

    def _search_content(self, case: Case, search: Search, state: BatchSearch) -> dict[str, Any]:
        """Turn a search that has ended into rows, as a job would return them."""
        outcome = self.store.trials[case.key][str(state.best)] if state.best else {}
        varied = search.varies
        figures = {varied: state.best, "num_trials": len(state.trials), **outcome.get("figures", {})}
        plain = self.store.results.get(search.compared_with)
        sizes = [row.value for row in plain.measured.rows if row.metric == varied] if plain is not None else []
        if sizes and sizes[0]:
            figures[f"{varied}_over_plain"] = state.best / sizes[0]
        rows = [{"case": case.title, "metric": name, "value": value} for name, value in figures.items()]
        return {"rows": rows, "config": {**search.config, **outcome.get("config", {})}, "repeats": 0}

    def _say(self, text: str) -> None:
        print(f"[{self.clock() - self._start:4.0f} s] {text}", file=sys.stderr, flush=True)


_TELLING = (
    "ratio", "run_ratio", "step_seconds", "peak_bytes", "budget_bytes", "reserved_bytes", "stall_seconds", "batch_size",
    "host_forward_seconds", "host_backward_seconds", "forward_idle_seconds", "backward_idle_seconds",
)  # fmt: skip


def _summary(measured: Measurements) -> list[str]:
    """Return one line for each title, with the figures that tell most."""
    lines = []
    for title, rows in groupby(measured.rows, key=lambda row: row.case):
        told = [row for row in rows if row.metric in _TELLING or row.metric.endswith("_per_second")]
        figures = [f"{row.metric} {format_value(row.metric, row.value)}" for row in told]
        lines.append(f"{title}: {'; '.join(filter(None, [', '.join(figures), measured.notes.get(title, '')]))}")
    return lines

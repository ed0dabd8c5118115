"""The result file of a suite of many cases: written after each case, and the place to resume from.

It has the shape of every result file (results.py) and two entries more: `cases`, where each case by its key says
how it ended, how long it took, on which commit, and which rows are its own; and `trials`, what searches that
have not ended yet found out so far.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.results import Measurements, Row, error_row, together, write_result


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What one case gave.

    Attributes:
        state: How it ended.
        seconds: How long it took.
        commit: What was measured.
        measured: Its rows and what goes with them.
    """

    state: Literal["done", "error"]
    seconds: float
    commit: str
    measured: Measurements


def failed(title: str, message: str, *, seconds: float, commit: str) -> CaseResult:
    """Return the result of a case that ended without figures."""
    measured = Measurements(rows=[error_row(title)], config={}, repeats=0, notes={title: message})
    return CaseResult(state="error", seconds=seconds, commit=commit, measured=measured)


@dataclass(slots=True, kw_only=True)
class Store:
    """The results of all cases so far.

    Attributes:
        path: The file.
        suite: Name of the suite.
        device: What was measured.
        environment: Versions and the like, of the run that writes.
        order: Keys in the order in which their rows are to be shown.
        results: What is known, by key.
        trials: For each search that is under way what its trials gave, by what was tried.
    """

    path: Path
    suite: str
    device: str
    environment: dict[str, Any]
    order: Sequence[str]
    results: dict[str, CaseResult] = field(default_factory=dict)
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)

    def load(self) -> None:
        """Take over what the file holds, if there is one."""
        if not self.path.exists():
            return
        content = json.loads(self.path.read_text(encoding="utf-8"))
        self.trials = content.get("trials", {})
        for key, entry in content.get("cases", {}).items():
            self.results[key] = _result_of(key, entry, content)

    def forget(self, keys: Iterable[str]) -> None:
        """Drop what is known of some cases."""
        for key in keys:
            self.results.pop(key, None)
            self.trials.pop(key, None)

    def put(self, key: str, result: CaseResult) -> None:
        """Keep what a case gave, on disk too."""
        self.results[key] = result
        self.trials.pop(key, None)
        self.save()

    def put_trial(self, key: str, tried: int, outcome: dict[str, Any]) -> None:
        """Keep what one trial of a search gave, on disk too."""
        self.trials.setdefault(key, {})[str(tried)] = outcome
        self.save()

    @property
    def measured(self) -> Measurements:
        """All cases together."""
        return together({key: self.results[key].measured for key in self._keys()})

    def save(self) -> None:
        """Write the file."""
        cases = {key: _entry_of(self.results[key]) for key in self._keys()}
        write_result(
            self.path, self.suite, self.device, self.measured, self.environment, cases=cases, trials=self.trials
        )  # fmt: skip

    def _keys(self) -> list[str]:
        """Keys of what is known, those of cases that are not there any more at the end."""
        rank = {key: index for index, key in enumerate(self.order)}
        return sorted(self.results, key=lambda key: rank.get(key, len(rank)))


def _entry_of(result: CaseResult) -> dict[str, Any]:
    return {
        "state": result.state,
        "seconds": round(result.seconds, 1),
        "commit": result.commit,
        "repeats": result.measured.repeats,
        "titles": list(dict.fromkeys(row.case for row in result.measured.rows)),
    }


def _result_of(key: str, entry: dict[str, Any], content: dict[str, Any]) -> CaseResult:
    """Find the rows of one case among those of all."""
    titles = set(entry["titles"])
    measured = Measurements(
        rows=[Row(**row) for row in content["rows"] if row["case"] in titles],
        config=content["config"].get(key, {}),
        repeats=entry["repeats"],
        spread={title: series for title, series in content["spread"].items() if title in titles},
        notes={title: note for title, note in content.get("notes", {}).items() if title in titles},
    )
    return CaseResult(state=entry["state"], seconds=entry["seconds"], commit=entry["commit"], measured=measured)

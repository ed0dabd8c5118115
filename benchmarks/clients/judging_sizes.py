"""What runs with a finder of the batch size say. Pure functions over what `finding.measure` returns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.clients.judging import Found

PLAIN, DEFAULTS, THROUGHPUT, LONG = "plain", "defaults", "throughput", "long, defaults"
"""The runs."""

MOST_SHARE, MOST_SECONDS = 0.05, 60.0
"""Of a run, or in all, whichever is more: what a finder with its defaults may take."""

LEAST_GAIN = 1.1
"""From so many samples per second on, by those of the configured size, a finder for throughput has to change it."""


def faults(found: Found) -> list[str]:
    """A fit that ends early, a long search, a size that should have been changed, and other bits where none was."""
    if "missing" in found:
        return []
    return [f"{label}: {told}" for label, run in found["runs"].items() for told in _faults(found, label, run)]


def _faults(found: Found, label: str, run: dict[str, Any]) -> Iterator[str]:
    tuned, plain = run["tuned"], found["runs"][PLAIN]
    if run["state"] != "done" or not tuned["is_over"]:
        yield run["message"] or "the fit did not come to its end"
        return
    if label == PLAIN or not plain["tuned"]["is_over"]:
        return
    result, warnings = tuned["result"], run["seen"]["warnings"]
    if (result is None or not result["note"]) and not is_changed(tuned) and len(warnings) != 1:
        yield f"nothing was tuned, and {len(warnings)} warnings say why"
    if label == LONG:
        pass  # there is no plain run as long
    elif not is_changed(tuned):
        differing = [name for name in ("weights", "random_state") if run["seen"][name] != plain["seen"][name]]
        if differing:
            yield f"nothing was changed, but {' and '.join(differing)} differ".replace("_", " ")
    elif "num_batches" in tuned:
        expected = plain["tuned"]["num_batches"] * result["configured"] / result["batch_size"]
        if abs(tuned["num_batches"] - expected) > 1:
            yield f"{tuned['num_batches']} batches an epoch, not {expected:.1f}"
    most = max(MOST_SHARE * tuned["run_seconds"], MOST_SECONDS)
    if label != THROUGHPUT and taken(found, label) > most:
        yield f"the finder took {taken(found, label):.0f} s, more than {most:.0f} s"
    if label == THROUGHPUT and found["has_size"] and not (result or {}).get("trials"):
        yield "nothing was tried"
    is_same = result is not None and result["batch_size"] == result["configured"]
    if (label == THROUGHPUT or THROUGHPUT not in found["runs"]) and is_same and gain(result) >= LEAST_GAIN:
        yield f"{result['configured']} was kept, where trials show a size that is {gain(result):.2f} times as fast"


def is_changed(tuned: dict[str, Any]) -> bool:
    """Whether a run was not as it was configured."""
    return tuned["result"] is not None and not tuned["result"]["is_kept"]


def gain(result: dict[str, Any], size: int | None = None) -> float:
    """Samples per second by those of the configured size, as trials show: of a size, or of the best; 0 without any."""
    speeds: dict[int, list[float]] = {}
    for tried, speed in result["trials"]:
        speeds.setdefault(tried, []).append(speed)
    known = {tried: statistics.median(each) for tried, each in speeds.items()}
    best = max(known.values(), default=0.0) if size is None else known.get(size, 0.0)
    return best / known[result["configured"]] if result["configured"] in known else 0.0


def taken(found: Found, label: str) -> float:
    """What the finder took, by itself or by the clock outside, whichever is more."""
    plain, tuned = (found["runs"][each]["tuned"] for each in (PLAIN, label))
    outside = max(tuned["before_seconds"] - plain["before_seconds"], 0.0)
    return float(max(outside, tuned["result"]["seconds"] if tuned["result"] else 0.0))


def told(found: Found) -> list[str]:
    """What users were told of each run: warnings, or the note of the result."""
    texts = {label: [*run["seen"]["warnings"], (run["tuned"]["result"] or {}).get("note", "")]
             for label, run in found["runs"].items()}  # fmt: skip
    return [f"{label}: {text}" for label, each in texts.items() for text in each if text]


def figures(found: Found) -> dict[str, float]:
    """By metric, of a training whose runs ended well."""
    return dict(_figures(found))


def _figures(found: Found) -> Iterator[tuple[str, float]]:
    for label, run in found["runs"].items():
        name, tuned = label.replace(", ", "_"), run["tuned"]
        yield f"{name}_run_seconds", tuned["run_seconds"]
        if label == PLAIN:
            continue
        yield f"{name}_finder_seconds", taken(found, label)
        if tuned["result"]:
            result, plain = tuned["result"], found["runs"][PLAIN]["tuned"]
            if label != LONG:
                yield f"{name}_speedup", plain["run_seconds"] / (tuned["run_seconds"] - taken(found, label))
            yield "num_configured", result["configured"]
            yield f"num_{name}", result["batch_size"]
            yield f"{name}_gain", gain(result, result["batch_size"])
            yield f"{name}_best_gain", gain(result)

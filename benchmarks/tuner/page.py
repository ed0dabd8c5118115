"""docs/tuner.md: what the tuner was good for, from a stored result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.pairs import quartiles
from benchmarks.results import Row
from benchmarks.tables import failures, goal_table, machine, markdown, versions
from benchmarks.tuner.contest_rows import contest_lines
from benchmarks.tuner.contests import Run
from benchmarks.tuner.pictures import picture_name, records_of
from benchmarks.tuner.racing import Race, ratios
from benchmarks.tuner.records import Record, unsettled
from benchmarks.tuner.sleeping import Outcome
from lightning_offload.tuning.trial import Trial
from lightning_offload.units import format_bytes, format_seconds

DOCUMENT = "tuner.md"
_UNKNOWN = "-"


def page(result: dict[str, Any]) -> str:
    """Return the document that is made from a stored result."""
    environment, config = result["environment"], result["config"]
    load = "" if config["load_average"] is None else f"; load average at the start {config['load_average']:.1f}"
    load += f"; {config['remark']}" if config.get("remark") else ""  # written in by who ran it
    lines = [
        _INTRODUCTION,
        f"Machine: {machine(environment)}{load}.",
        f"Versions: {versions(environment)}. Commit: {environment['commit']}.",
        "",
        "## All goals",
        "",
        goal_table([Row(**row) for row in result["rows"]]),
        "",
    ]
    notes = result.get("notes", {})
    for record in records_of(config):
        lines += _job(record, has_picture="pictures" not in notes)
    outcomes = [Outcome(**outcome) for outcome in config["sleeping"]]
    lines += ["## Known curves", "", _KNOWN, "", *_sleeping(outcomes), ""]
    runs = [Run(**run) for run in config.get("contest_runs", ())]  # older results have none
    lines += contest_lines(runs, config.get("contests", ()))
    lines += failures(result, "## Not measured")
    return "\n".join(lines).rstrip() + "\n"


def _job(record: Record, *, has_picture: bool) -> Iterator[str]:
    yield from (f"## {record.title}", "", _settings(record), "", *_choice(record), "")
    if has_picture:
        yield f"![Throughput and peak of {record.title} against batch size](images/{picture_name(record.key)})"
        yield ""
    yield from ("### Throughput and peak", "", _grid(record), "")
    yield from ("### Trials", "", *_trials(record), "")
    target = record.config["target_loss"]
    yield from (f"### Time to a training loss of {target:g}", "", *_races(record), "")


def _settings(record: Record) -> str:
    shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in record.config.items())
    return f"{shown[0].upper()}{shown[1:]}. Budget {_bytes(record.result.budget_bytes)}."


def _choice(record: Record) -> Iterator[str]:
    result, verdict = record.result, record.verdict
    how = "predicted" if result.is_largest_predicted else "tried"
    yield f"- Configured: {record.config['batch_size']}, learning rate {record.config['lr']:g}."
    yield (
        f"- Found: **{result.batch_size}**, learning rate {result.lr:g}, in {len(result.trials)} trials and "
        f"{format_seconds(record.tuning_seconds)} (recording, planning and restoring included); the search's own "
        f"confidence is {result.confidence:.0%}."
    )
    yield (
        f"- Largest that fits: {result.largest_size} with the memory plan ({how}), {result.largest_plain_size} without "
        "(predicted)."
    )
    smaller = ""
    if verdict.smaller_over_best is not None:
        smaller = (
            f"; of those below {0.75 * result.batch_size:g}, the fastest ({verdict.smaller_size}) has "
            f"{verdict.smaller_over_best:.1%} of it"
        )
    yield (
        f"- On the measured curve the choice is **{'right' if verdict.is_right else 'wrong'}**: it has "
        f"{1 / verdict.best_over_chosen:.1%} of the throughput of the fastest size ({verdict.best_size}){smaller}."
    )
    for low, high, limit in unsettled(record):
        yield (
            f"- The rounds of the measurement do not settle that: 95% of their resamples put a ratio with the limit "
            f"{limit:.3f} between {low:.3f} and {high:.3f}."
        )
    if record.infeasible:
        yield f"- No plan was possible for {', '.join(map(str, record.infeasible))}, which was predicted to fit."
    if result.note:
        yield f"- {result.note}"


def _grid(record: Record) -> str:
    predicted, chosen = record.predicted(), record.result.batch_size
    lines = []
    for found in record.measured:
        size = f"**{found.batch_size}**" if found.batch_size == chosen else str(found.batch_size)
        low, _, high = quartiles([seconds for steps in found.step_seconds for seconds in steps])
        speed, peak = predicted.get(found.batch_size, (None, None))
        lines.append((
            size if found.is_planned else f"{size} (plan not final)",
            f"{found.samples_per_second:.1f}",
            _UNKNOWN if speed is None else f"{speed:.1f}",
            f"{format_seconds(low)} to {format_seconds(high)}",
            _bytes(found.peak_bytes),
            _bytes(peak),
            _bytes(found.recomputed_bytes),
            _bytes(found.swapped_bytes),
        ))  # fmt: skip
    header = ("batch size", "samples/s", "predicted", "step, quartiles", "peak", "predicted", "recomputed", "swapped")
    return markdown(header, lines)


def _trials(record: Record) -> Iterator[str]:
    yield "| trial | batch size | samples/s | predicted | peak | predicted | |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for number, trial in enumerate(record.result.trials, 1):
        yield f"| {number} | {' | '.join(_trial(trial))} |"


def _trial(trial: Trial) -> tuple[str, ...]:
    speeds = (trial.samples_per_second, trial.predicted_samples_per_second)
    texts = [_UNKNOWN if speed is None else f"{speed:.1f}" for speed in speeds]
    peaks = [_bytes(peak) for peak in (trial.peak_bytes, trial.predicted_peak_bytes)]
    return (str(trial.batch_size), *texts, *peaks, trial.reason.split(": ")[0])


def _races(record: Record) -> Iterator[str]:
    yield "| seed | batch size | learning rate | steps | time | loss | tuned / base |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    by_seed: dict[int, list[Race]] = {}
    for race in record.races:
        by_seed.setdefault(race.seed, []).append(race)
    for seed, pair in by_seed.items():
        ratio = next(iter(ratios(pair)), None)
        for race in sorted(pair, key=lambda race: race.is_tuned):
            time = format_seconds(race.seconds) + ("" if race.has_arrived else ", given up")
            shown = f"{ratio:.2f}" if race.is_tuned and ratio is not None else ""
            yield (
                f"| {seed} | {race.batch_size} | {race.lr:g} | {race.num_steps} | {time} | {race.loss:.3f} | {shown} |"
            )


def _sleeping(outcomes: list[Outcome]) -> Iterator[str]:
    yield "| curve | searches | right | most trials | best over chosen throughput, most |"
    yield "| --- | --- | --- | --- | --- |"
    for shape in dict.fromkeys(outcome.shape for outcome in outcomes):
        group = [outcome for outcome in outcomes if outcome.shape == shape]
        ratios_found = [o.best_over_chosen for o in group if o.best_over_chosen is not None]
        worst = f"{max(ratios_found):.3f}" if ratios_found else _UNKNOWN
        num_right = sum(outcome.is_right for outcome in group)
        yield f"| {shape} | {len(group)} | {num_right} | {max(o.num_trials for o in group)} | {worst} |"


def _bytes(value: int | None) -> str:
    return _UNKNOWN if value is None else format_bytes(value)


_INTRODUCTION = """# The tuner, measured

Written by `python -m benchmarks tables` from `benchmarks/results/`; do not edit. `python -m benchmarks tuner` measures
it again, in an hour or two on a core that have nothing else to do. How the tuner works is in
[tuning.md](tuning.md).

How: two models on data that need no download, the digits of scikit-learn and the sources of modules of Python's
standard library (the names stand in `benchmarks/tuner/text.py`, a token is a byte). The budget of a job is the peak of
its plain step at `plain size`, as on a device where training without a memory plan ends there. The finder runs in
Lightning's Trainer with `OffloadStrategy`. Then throughput is measured without the finder: steps of all sizes in
interleaved rounds, optimizer included; peaks are counted by a tracker that asks the library nothing.

A choice is *right* if its throughput is at least 95% of the fastest size's, and no size below 0.75 of it reaches 98.5%.
Predictions are those that the finder made from a few recorded steps, before it ran its trials. On a virtual machine
whose neighbours slow it down for minutes, speeds of the recording, of the trials and of the measurement differ by tens
of percent, and a finder that says it was not sure means that.

The races train from the same seeds, under the same budget, with the configured and with the found size and learning
rate, until the mean training loss of the last `window` samples is low enough. The clock counts all of the training but
not the finder. A ratio below 1 says that the found values were faster. The finder is asked for throughput alone here,
without its usual gates and without a warm-up of the rate, so a ratio above 1 is possible with the right size: a larger
batch makes fewer updates from the same samples, and a raised rate without a warm-up is what slows GPT-2 down.
"""

_KNOWN = """Searches without a prediction, on modules that sleep for known times and have no memory above a size; where
a curve bends and where memory ends are drawn. Steps of the noisy one scatter by 5%."""

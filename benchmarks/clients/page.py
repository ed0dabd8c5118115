"""docs/clients.md, and what a terminal is shown, from what is kept of each client."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.tables import markdown, versions
from lightning_offload.units import format_bytes

DOCUMENT = "clients.md"
_HEADER = (
    "training", "plain peak", "budget", "peak within it", "with kernels' own", "steps planned", "CPU time, budget",
    "CPU time, ample", "bits",
)  # fmt: skip
_SIZES_HEADER = (
    "training", "configured", "with defaults", "finder's time", "for throughput", "samples per second", "run",
    "finder's time", "a longer run, with defaults",
)  # fmt: skip


def page(result: dict[str, Any]) -> str:
    """Return the document that is made from a stored result."""
    records, environment = result["config"]["clients"], result["environment"]
    finding = [record for record in records if record.get("finds")]
    budgets = [record for record in records if not record.get("finds")]
    packages = {name: version for record in records for name, version in record.get("versions", {}).items()}
    named = versions({"versions": {**environment["versions"], **packages}})
    commits = ", ".join(dict.fromkeys(record["commit"] for record in records))
    told = [line for record in records for line in _told(record)]
    lines = [
        _INTRODUCTION,
        markdown(_HEADER, map(_cells, budgets)),
        "",
        *_noise(budgets),
        *([_SIZES, markdown(_SIZES_HEADER, map(_size_cells, finding)), ""] if finding else []),
        *(["## What was told", "", *told, ""] if told else []),
        "## What was added",
        "",
        markdown(("training", "in its code"), ((record["title"], f"`{record['added']}`") for record in records)),
        "",
        f"{environment['processor']}, one thread, {environment['system']}. Versions: {named}. Commit: {commits}.",
    ]
    return "\n".join(lines) + "\n"


def terminal_table(records: Sequence[dict[str, Any]]) -> Group:
    """The same table, and what was told, for a terminal."""
    finding = [record for record in records if record.get("finds")]
    budgets = [record for record in records if not record.get("finds")]
    tables = []
    for header, cells, shown in ((_HEADER, _cells, budgets), (_SIZES_HEADER, _size_cells, finding)):
        table = Table(title="Other people's packages")
        for name in header:
            table.add_column(name, overflow="fold")
        for record in shown:
            table.add_row(record["name"], *cells(record)[1:])
        tables += [table] if shown else []
    return Group(*tables, *(Text(line) for record in records for line in _told(record)))


def _cells(record: dict[str, Any]) -> list[str]:
    figures, state = record["figures"], record["state"]
    if not figures:
        return [record["title"], *["-"] * (len(_HEADER) - 2), {"missing": "not installed"}.get(state, f"**{state}**")]
    plain = f"{_bytes(figures['plain_peak_bytes'])}"
    ample = f"{figures['ample_ratio']:.2f}"
    bits = "**failed**" if record["faults"] else "the same"
    if "budget_bytes" not in figures:
        planned = f"{figures['num_ample_planned']:.0f} of {figures['num_steps']:.0f}"
        return [record["title"], plain, "refused", "-", "-", planned, "-", ample, bits]
    return [
        record["title"],
        plain,
        f"{_bytes(figures['budget_bytes'])} ({figures['budget_share']:.2f})",
        _bytes(figures["tight_peak_bytes"]),
        _bytes(figures["tight_allocated_bytes"]) if figures["tight_allocated_bytes"] else "-",
        f"{figures['num_tight_planned']:.0f} of {figures['num_steps']:.0f}",
        f"{figures['tight_ratio']:.2f}",
        ample,
        bits,
    ]


def _size_cells(record: dict[str, Any]) -> list[str]:
    figures, state = record["figures"], record["state"]
    if not figures:
        lacks = "not installed" if state == "missing" else f"**{state}**"
        return [record["title"], lacks, *["-"] * (len(_SIZES_HEADER) - 2)]

    def time_of(name: str) -> str:
        if f"{name}_finder_seconds" not in figures:
            return "-"
        return f"{figures[f'{name}_finder_seconds']:.1f} of {figures[f'{name}_run_seconds']:.1f} s"

    def size_of(name: str) -> str:
        return f"{figures[f'num_{name}']:.0f}" if f"num_{name}" in figures else "-"

    searched = next((name for name in ("throughput", "defaults") if figures.get(f"{name}_best_gain")), None)
    gains = f"{figures[f'{searched}_gain']:.2f} of {figures[f'{searched}_best_gain']:.2f}" if searched else "-"
    long = "-" if size_of("long_defaults") == "-" else f"{size_of('long_defaults')}, {time_of('long_defaults')}"
    return [
        f"{record['title']}{' (**failed**)' if record['faults'] else ''}",
        size_of("configured"),
        size_of("defaults"),
        time_of("defaults"),
        size_of("throughput"),
        gains,
        f"{figures[f'{searched}_speedup']:.2f}" if searched else "-",
        time_of("throughput"),
        long,
    ]


def _noise(records: Sequence[dict[str, Any]]) -> list[str]:
    """How far plain steps that were timed twice are apart."""
    apart = [abs(record["figures"]["plain_again_ratio"] - 1) for record in records if record["figures"]]
    if not apart:
        return []
    middle, most = statistics.median(apart), max(apart)
    told = f"Plain steps, timed before and after the others, were {middle:.0%} apart in the middle, {most:.0%} at most."
    return [told, ""]


def _told(record: dict[str, Any]) -> list[str]:
    """Refusals, warnings and faults, as lines of a list."""
    told = [f"fails: {fault}" for fault in record["faults"]]
    if record["state"] == "missing":
        told.append(f"not installed: {record['message']}")
    told += [f"{share} of plain's peak is refused: {message}" for share, message in record.get("refused", {}).items()]
    told += [f"warns: {message}" for message in dict.fromkeys(record.get("warnings", ()))]
    told += [f"says: {message}" for message in record.get("says", ())]
    return [f"- {record['title']}: {' '.join(line.split())}" for line in told]


def _bytes(num_bytes: float) -> str:
    return format_bytes(round(num_bytes))


_INTRODUCTION = """# Other people's packages

Written by `python -m benchmarks tables` from `benchmarks/results/`; do not edit. `make test-clients` installs the
packages into an environment of their own and trains all of this again, in 20 minutes.

Each package trains a small net, random weights and synthetic data, by its own entry point, with the plugin added as
its users would add it ([below](#what-was-added)): forty steps on a CPU, each run in a process of its own with the same
seed.

- *Bits*: the loss of each step, all weights, and the random state at the end, with a tight budget and with an ample
  one, are those of the plain run, or the suite fails.
- *Plain peak* and *peak within it*: live bytes of tensors at most in forward and backward, counted from outside, by a
  tracker that asks the library nothing; under a budget in the steps under a plan. Above the budget without a warning
  the suite fails.
- *With kernels' own*: the same of the last step as torch's allocator counts it, with what kernels allocate and free
  within themselves, such as the copies that convolutions make in another layout. On a CPU the library counts live
  tensors, so this may be above the budget.
- *Steps planned*: those under a plan; the others were recorded, verified or measured to make one. A refused budget has
  those of the ample one.
- *CPU time* of a step, all threads together, over plain's: the median from step 20 on, timed where nothing is counted.
  Steps are tiny, some tens of milliseconds, so what the library costs the host shows more than with nets of a size that
  needs it; and so does what else the machine did.
- *Budget*: a share of plain's peak, the first of 0.75, 0.85 and 0.95 that is not refused.
"""

_SIZES = """## The batch size

The same on more data, with a finder of the batch size: with its defaults, which leave a run of this length as it is,
and for throughput with 60 seconds at most. A function has the defaults alone, which are for throughput. *Finder's time*
is what it says, or what a clock outside says from `setup` to the first batch, whichever is more. *Samples per second*
are those of the size that was set, and the most that a trial shows, by those of the configured one. *Run* is how many
times as fast as the plain one the rest of the run was, its dataloaders and all else included. The suite fails

- where a fit does not come to its end;
- where a finder with defaults takes more than a minute and more than 5% of the run;
- where one for throughput keeps the size though its trials show another that is 1.1 times as fast, or tries nothing
  though it can set the size;
- where nothing is changed, and weights or the random state differ from the plain run's, or neither one warning nor the
  result's note says why.
"""

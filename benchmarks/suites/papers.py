"""The papers' tables without a GPU: each published figure beside ours, and why they differ where they do.

Some figures are counted on networks of layers by the papers' own rules, others come from our planner on steps recorded
under FakeTensorMode for the papers' GPUs; see `benchmarks.papers`. `--quick` does those that take seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import Progress
from rich.table import Table

from benchmarks.papers import rows_batch, rows_depth, rows_layers, rows_time
from benchmarks.papers.figures import HEADER, Figure, decode, encode
from benchmarks.results import Measurements, Options, error_row

TITLE = "The papers' figures without a GPU"
DOCUMENT = "papers.md"

SOURCES = {
    "SuperNeurons": "Wang et al., PPoPP 2018, arXiv 1801.04380",
    "Layrub": "Jin et al., TACO 2018, doi 10.1145/3243904",
    "Layup": "Jiang et al., TACO 2019",
    "Meng et al.": "Training deeper models by GPU memory optimization on TensorFlow, 2017",
    "TFLMS": "Le et al., arXiv 1807.02037",
    "Capuchin": "Peng et al., ASPLOS 2020",
    "TSPLIT": "Nie et al., ICDE 2022",
    "DTR": "Kirisame et al., ICLR 2021",
    "vDNN": "Rhu et al., MICRO 2016",
    "Hascoet et al.": "Hascoet et al., 2019",
    "AccUDNN": "2019, arXiv 1901.06773",
}
"""Where each system was published."""

Task = Callable[[], Iterator[Figure]]

_LAYERS: dict[str, Task] = {
    "SuperNeurons, peaks of AlexNet": rows_layers.superneurons_peaks,
    "SuperNeurons, extra forwards": rows_layers.superneurons_extra_forwards,
    "SuperNeurons, tensor cache": rows_layers.superneurons_cache,
    "Layrub, constant intermediates": rows_layers.layrub_constant,
}
_TIMES: dict[str, Task] = {
    "vDNN": rows_time.vdnn,
    "Hascoet et al.": rows_time.hascoet,
    "AccUDNN, memory": rows_time.accudnn_memory,
    "AccUDNN, efficient batch": rows_time.accudnn_batch,
    "DTR, time": rows_time.dtr,
}


def tasks(*, quick: bool) -> dict[str, Task]:
    """Return what there is to do, by name."""
    batches = rows_batch.QUICK_CLAIMS if quick else rows_batch.CLAIMS
    found = {f"{c.system}, batch of {c.title}": functools.partial(rows_batch.largest, c) for c in batches}
    if quick:
        return {**_LAYERS, **found, "vDNN": rows_time.vdnn}
    depths = {
        f"{c.system}, depth at batch {c.batch_size}": functools.partial(rows_depth.deepest, c)
        for c in rows_depth.DEPTH_CLAIMS
    }
    memory = {
        f"Meng et al., memory of {c.title}": functools.partial(rows_depth.memory, c) for c in rows_depth.MEMORY_CLAIMS
    }
    return {**_LAYERS, **found, **depths, **memory, **_TIMES}


def run(options: Options, progress: Progress) -> Measurements:
    """Derive all figures; a task that fails gives an error row and a note, and the others go on."""
    todo = tasks(quick=options.quick)
    bar = progress.add_task("papers", total=len(todo))
    figures, failures = [], {}
    for name, task in todo.items():
        progress.update(bar, description=name)
        try:
            figures += list(task())
        except Exception as error:  # the rest is of use without this one
            failures[name] = f"{type(error).__name__}: {error}"
        progress.advance(bar)
    return Measurements(
        rows=[*(row for figure in figures for row in figure.rows()), *map(error_row, failures)],
        config={"figures": [encode(figure) for figure in figures], "is_calibrated": True},
        repeats=1,
        notes=failures,
    )


def figures_of(config: dict[str, Any]) -> list[Figure]:
    """Return the figures of a result."""
    return [decode(data) for data in config["figures"]]


def table(measurements: Measurements) -> Table:
    """Return claims beside ours, for a terminal."""
    shown = Table(title=TITLE, show_lines=False)
    for name in HEADER:
        shown.add_column(name, justify="right" if name in ("published", "ours") else "left")
    last = ""
    for figure in figures_of(measurements.config):
        if last and figure.system != last:
            shown.add_section()
        shown.add_row(*figure.cells())
        last = figure.system
    return shown


def page(result: dict[str, Any]) -> str:
    """Return the document that is made from a stored result."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    pricing = _CALIBRATED if result["config"].get("is_calibrated") else _AT_PEAKS
    lines = [_INTRODUCTION.replace("PRICING", pricing), f"Versions: {versions}. Commit: {environment['commit']}.", ""]
    by_system: dict[str, list[Figure]] = {}
    for figure in figures_of(result["config"]):
        by_system.setdefault(figure.system, []).append(figure)
    for system, figures in by_system.items():
        lines += [f"## {system}", "", f"{SOURCES[system]}.", "", *_markdown(figures), ""]
    errors = [row["case"] for row in result["rows"] if row["metric"] == "error"]
    if errors:
        notes = result.get("notes", {})
        lines += [
            "## Not derived",
            "",
            *(f"- {case}: {notes.get(case, 'for an unknown reason')}" for case in errors),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(figures: list[Figure]) -> Iterator[str]:
    header = HEADER[1:]
    yield f"| {' | '.join(header)} |"
    yield f"| {' | '.join('---' for _ in header)} |"
    for figure in figures:
        yield f"| {' | '.join(figure.cells()[1:])} |"


_CALIBRATED = (
    "ops at the shares of its peaks that public measurements show ([calibration.md](calibration.md) says how near that "
    "comes and what it assumes)"
)
_AT_PEAKS = (
    "ops at the peaks of its datasheet (the figures below were derived before devices were calibrated, see "
    "[calibration.md](calibration.md): such times are too short by a factor that differs from model to model)"
)

_INTRODUCTION = """# The papers' figures, without a GPU

Written by `python -m benchmarks tables` from `benchmarks/results/`; do not edit. `python -m benchmarks papers` derives
the figures again, on any computer.

How: *layers* counts on a network of layers by the paper's own rules and is exact. *Fake capture* records a training
step of our model without running it and asks our planner for the smallest peak that it can promise; bytes are exact,
gradients and momentum included, workspaces of kernels not. *Simulation* plans such a step for the paper's GPU, with
PRICING; time added is against a step with all the memory it wants. GPUs have the memory that their drivers report,
hosts have 100 GiB to swap to.
"""

"""The papers' tables without a GPU: each published figure beside ours, and why they differ where they do.

Some figures are counted on networks of layers by the papers' own rules, others come from our planner on steps recorded
under FakeTensorMode for the papers' GPUs; see `benchmarks.papers`. `--quick` does those that take seconds.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from rich.progress import Progress
from rich.table import Table

from benchmarks.papers import captures, rows_batch, rows_depth, rows_layers, rows_time
from benchmarks.papers.captures import GIB
from benchmarks.papers.figures import HEADER, Figure, Verdict
from benchmarks.results import Measurements, Options, error_row
from benchmarks.tables import failures, markdown, versions

TITLE = "The papers' figures without a GPU"
DOCUMENT = "papers.md"

SOURCES = {
    "SuperNeurons": "Wang et al., PPoPP 2018, arXiv 1801.04380. Its abstract has 3.2432 times deeper and ResNet-2500; "
    "the rest is in its tables 1, 3, 4 and 5 and its figure 10",
    "Layrub": "Jin et al., TACO 2018, doi 10.1145/3243904. Figures of its evaluation, by our notes",
    "Layup": "Jiang et al., TACO 2019. Its abstract has 7.4 times; the depth is by our notes",
    "Meng et al.": "Training deeper models by GPU memory optimization on TensorFlow, 2017. Its abstract has batches 2 "
    "to 30 times as large: 30 is the last row of the translation model; the rest is by our notes of its tables",
    "TFLMS": "Le et al., arXiv 1807.02037, by our notes",
    "Capuchin": "Peng et al., ASPLOS 2020, by our notes of its table of largest batches",
    "TSPLIT": "Nie et al., ICDE 2022, by our notes; its table has SuperNeurons beside it and no plain framework",
    "DTR": "Kirisame et al., ICLR 2021, by our notes",
    "vDNN": "Rhu et al., MICRO 2016. Its abstract has 28 GB in a card of 12 GB at 18% loss",
    "Hascoet et al.": "Hascoet et al., 2019. Its abstract has 35% less memory for 21% more time",
    "AccUDNN": "2019, arXiv 1901.06773. All figures are in its abstract; equations and batches are not public",
}
"""Where each system was published, and where its figures are from."""

MISSING = (
    ("Layrub", "memory saved on average", "-58.2%", "which networks and batches are in the mean is not known"),
    ("Layrub", "time added, VGG", "+20.6%", "the batch and the memory are not known"),
    ("Layup", "memory saved on average against Caffe", "-66%", "which networks are in the mean is not known"),
    ("Meng et al.", "largest batch of a GAN", "48 of 24", "which network it is, is not known"),
    ("Meng et al.", "largest batch of NMT", "824 of 496", "its sizes are not known; lengths 50 to 400 are above"),
    ("AccUDNN", "no loss of accuracy on 8 GPUs", "", "nothing was trained on eight GPUs here"),
    ("POFO", "activations 4 to 6 times less below 20% more time", "", "its networks are not among ours"),
    ("HiRemate", "50 to 70% less for 10 to 15% more time", "", "its networks are not among ours"),
    ("KARMA", "1.52 times as fast as out-of-core training", "", "a distributed measurement"),
)
"""Claims that have no figure of ours: system, what, published, and why."""

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
    "Layup": rows_time.layup,
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
        f"{c.system}, memory of {c.title}": functools.partial(rows_depth.memory, c) for c in rows_depth.MEMORY_CLAIMS
    }
    return {**_LAYERS, **found, **depths, **memory, **_TIMES}


def run(options: Options, progress: Progress) -> Measurements:
    """Derive all figures; a task that fails gives an error row and a note, and the others go on."""
    todo = tasks(quick=options.quick)
    bar = progress.add_task("papers", total=len(todo))
    figures, failed = [], {}
    for name, task in todo.items():
        progress.update(bar, description=name)
        try:
            figures += list(task())
        except Exception as error:  # the rest is of use without this one
            failed[name] = f"{type(error).__name__}: {error}"
        progress.advance(bar)
    return Measurements(
        rows=[*(row for figure in figures for row in figure.rows()), *map(error_row, failed)],
        config={"figures": [asdict(figure) for figure in figures]},
        repeats=1,
        notes=failed,
    )


def figures_of(config: dict[str, Any]) -> list[Figure]:
    """Return the figures of a result."""
    return [Figure(**data) for data in config["figures"]]


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
    figures = figures_of(result["config"])
    lines = [
        _INTRODUCTION,
        _counts(figures),
        "",
        f"Versions: {versions(environment)}. Commit: {environment['commit']}.",
        "",
    ]
    by_system: dict[str, list[Figure]] = {}
    for figure in figures:
        by_system.setdefault(figure.system, []).append(figure)
    for system, theirs in by_system.items():
        lines += [
            f"## {system}",
            "",
            f"{SOURCES[system]}.",
            "",
            markdown(HEADER[1:], [figure.cells()[1:] for figure in theirs]),
            "",
        ]
    missing = markdown(("system", "claim", "published", "why not"), MISSING)
    lines += ["## Claims without a figure of ours", "", missing, "", *failures(result, "## Not derived")]
    return "\n".join(lines).rstrip() + "\n"


def _counts(figures: list[Figure]) -> str:
    """How many figures of each system have which verdict, as a table."""
    verdicts: tuple[Verdict, ...] = ("beaten", "matched", "not reached", "not comparable")
    lines = []
    for system in dict.fromkeys(figure.system for figure in figures):
        found = collections.Counter(figure.verdict for figure in figures if figure.system == system)
        lines.append((system, *(str(found[verdict]) for verdict in verdicts)))
    return markdown(("system", *verdicts), lines)


_INTRODUCTION = f"""# The papers' figures, without a GPU

Written by `python -m benchmarks tables` from `benchmarks/results/`; do not edit. `python -m benchmarks papers` derives
the figures again, on any computer.

How: *layers* counts on a network of layers by the paper's own rules and is exact. *Fake capture* records a training
step of our model without running it and asks our planner for the smallest peak that it can promise; bytes of tensors
are exact, gradients and momentum included. *Simulation* plans such a step for the paper's GPU, with ops at the shares
of its peaks that public measurements show ([calibration.md](calibration.md) says how near that comes and what it
assumes); time added is against a step with all the memory it wants. No line of this page was measured on a GPU.

Memory: GPUs have the memory that their drivers report. Of that, {captures.CONTEXT_BYTES / GIB:g} GiB are taken off for
the process's context and libraries, {captures.WORKSPACE_BYTES / GIB:g} GiB for kernels' workspaces and
{captures.FRAGMENTATION:.0%} of the rest for what lies between blocks, for our plans and for plain PyTorch alike; bytes
that are compared with a process's have the same added. These are assumptions; the papers' figures are of whole
processes. Hosts have 100 GiB to swap to, or none where the system only recomputes.

Verdicts: each system is held against *its own* baseline, the plain framework of its paper, and ours against plain
PyTorch, because PyTorch needs less than the frameworks of that time to begin with. So there are two advantages: of the
figure itself, and of what it makes of its baseline (in brackets). The smaller of the two decides. *Beaten*: it is
more than 1%. *Matched*: within 1%; what counts the same thing by the same rules agrees to 0.1%. *Not reached*: below.
A better figure is *not comparable* where no baseline is at hand, where something of the setting is not known (the note
says what), or where ours is simulated, since theirs were measured; a worse one is not reached all the same.
"""

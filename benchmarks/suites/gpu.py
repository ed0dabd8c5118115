"""Everything worth knowing about a GPU, in one call: `python -m benchmarks gpu --minutes 9`.

Unlike other suites this one stores each case as soon as it is measured, and goes on from there in the next call.
`--device cpu --quick` tries the machinery on tiny models; that is stored only where `--results` says so.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.progress import Progress

from benchmarks import environment
from benchmarks.gpu.cases import all_cases, chosen
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.store import Store
from benchmarks.results import RESULTS_FOLDER, Measurements, Options, result_path

TITLE = "On a GPU"
STORES_ITSELF = True
_MINUTES = 9.0


def run(options: Options, progress: Progress) -> Measurements:
    """Measure what the minutes allow and was not measured before; returns all that is known."""
    progress.stop()  # a line for each case says more than a bar, and survives in a log
    device = options.device or environment.device().type
    cases = all_cases(device, quick=options.quick)
    wanted = chosen(cases, options.cases)
    with tempfile.TemporaryDirectory(prefix="benchmark-results-") as scratch:
        usual = Path(scratch) if options.quick else RESULTS_FOLDER
        name = environment.device_name(device)
        store = Store(
            path=result_path("gpu", name, options.folder or usual),
            suite="gpu",
            device=name,
            environment=environment.describe(device),
            order=[case.key for case in cases],
        )
        store.load()
        if options.fresh:
            store.forget(case.key for case in wanted)
        minutes = _MINUTES if options.minutes is None else options.minutes
        Runner(store=store, quick=options.quick, seconds=60 * minutes).run(wanted)
        return store.measured

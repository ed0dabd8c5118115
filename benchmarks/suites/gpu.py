"""Everything worth knowing about a GPU, in one call: `python -m benchmarks gpu --minutes 9`.

Unlike other suites this one stores each case as soon as it is measured, and goes on from there in the next call.
`--device cpu --quick` tries the machinery on tiny models; that is stored only where `--results` says so.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks import environment
from benchmarks.gpu.cases import all_cases, chosen
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.store import Store
from benchmarks.results import RESULTS_FOLDER, Measurements, Options, result_path
from benchmarks.tables import format_value, markdown

TITLE = "On a GPU"
STORES_ITSELF = True
_MINUTES = 9.0
_IN_SHORT = (
    ("overhead-resnet50", "ResNet-50", "budget fits the plain step", None),
    ("overhead-gpt2-medium", "GPT-2 medium", "budget fits the plain step", None),
    ("contest-resnet50", "ResNet-50", "h = 0.25", "checkpoint per block"),
    ("contest-gpt2-medium", "GPT-2 medium", "h = 0.25", "checkpoint per block"),
    ("activations-resnet152", "ResNet-152", "40% of its activation bytes", None),
    ("contest-gpt2-medium-bf16", "GPT-2 medium bf16", "at the peak of checkpoint per block", "checkpoint per block"),
    ("contest-gpt2-medium-bf16", "GPT-2 medium bf16", "at the peak of selective checkpoint", "selective checkpoint"),
)
"""Key of the case, model, budget, and the peer beside it."""


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


def short_table(result: dict[str, Any]) -> str:
    """Return plans beside the peers that they were measured with, won and lost alike, for README."""
    values = {(row["case"], row["metric"]): row["value"] for row in result["rows"]}
    lines = []
    for key, model, budget, peer in _IN_SHORT:
        ours, theirs = f"{model}, {budget}", f"{model}, {peer}"
        if (ours, "ratio") not in values:
            continue
        config = result["config"][key]
        plain = values.get((f"{model}, plain", "peak_bytes"))
        predicted = format_value("peak_bytes", values[ours, "predicted_plain_peak_bytes"])
        step = f"{model.removesuffix(' bf16')}, batch {config['batch_size']}, {config['precision']}"
        lines.append((
            step, f"{predicted} (predicted)" if plain is None else format_value("peak_bytes", plain),
            *_peak_and_added(values, ours),
            *((peer, *_peak_and_added(values, theirs)) if peer is not None else ("", "", "")),
        ))  # fmt: skip
    header = ("step", "plain peak", "peak within the budget", "adds", "beside it", "its peak", "it adds")
    return markdown(header, lines)


def _peak_and_added(values: dict[tuple[str, str], float], case: str) -> tuple[str, str]:
    return format_value("peak_bytes", values[case, "peak_bytes"]), f"{values[case, 'ratio'] - 1:+.1%}"

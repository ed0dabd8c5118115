"""docs/calibration.md: how near modelled step times are to public measurements, from a stored result."""

from __future__ import annotations

from typing import Any

from benchmarks.calibration.checking import CLOSE, Checked, median_error, share_close
from benchmarks.calibration.own import Own
from benchmarks.calibration.public import Public
from benchmarks.tables import markdown, versions

DOCUMENT = "calibration.md"
LEFT_OUT = ("model", "card", "source")
"""Attributes of rows: the halves have most of their values in common."""

_INTRODUCTION = """# How modelled times compare with public ones

Written by `python -m benchmarks tables` from `benchmarks/results/`; do not edit. `python -m benchmarks calibration`
fits and checks again, on any computer.

**What is modelled.** Steps that are planned without their device (the command line, [planning.md](planning.md),
[papers.md](papers.md)) have modelled op times. An op takes a launch and its arithmetic or its memory traffic,
whichever is longer, each at a share of the datasheet's peak that depends on the kind of op (convolution, depthwise
convolution, matrix product, fused attention, recurrent layer, reduction or normalization, anything else), on the
cores that do it (plain, TF32, half precision) and on the generation of the card.

**What every modelled time assumes.** Images channels-last where tensor cores convolve them: cuDNN transposes others,
which the table adds and plans leave out. Eager PyTorch, kernel by kernel: no compiler fuses ops. Sizes that fill the
device: shares do not fall for small ops, beyond the launch. Caches that hold nothing from one op to the next. A host
that is always ahead, and data that is there. The libraries of the years in which the cards were measured. The table's
steps are recorded as those of plans are: with the kernels that torch 2.13 calls on CUDA, whatever the source had.

**What copies cost.** A copy over the link takes as much of the device memory's bandwidth as its bytes need: compute
that could use all of it loses link rate over memory bandwidth of the copy's duration (`copy_interference`: 3.5% on a
K40c, 1.2% on an A100), compute that arithmetic limits less. The 10 us or so that a driver takes to start a copy count
as host cost of a swap, not as time of its lane: a lane of copies is simulated without gaps. Of memory, what the CUDA
context, libraries' workspaces and fragmentation take is not simulated either; MemoryPlugin measures it where it runs.

**Fit and check.** All measurements are sorted by name, and every second one is held out; the numbers come from the
others alone, by robust regression on log(predicted / public) with a prior for each number
(`benchmarks/calibration/fitting.py`). That rule was fixed before anything was fitted. The form of the model was not:
after a first fit (65% of the held half within 25%), whose errors on both halves had been looked at, four things were
changed. Where the source's script casts the whole model, it is recorded so and not under autocast; transposes of NCHW
images on tensor cores were added; GA102 (RTX 3090) was told apart from GA100 (A100) and put with Ada; and each
generation got a factor on its memory bandwidth. No number was fitted to the held half, but it is not blind to the
form.
"""

_AFTER = """\
The numbers, as `lightning_offload/graph/calibration.py` has them. A share above 1 means fewer operations than are
counted (Winograd) or clocks above the datasheet's. What no measurement speaks of stays at the prior: depthwise
convolutions at 5%, fused attention outside of half precision at 50%; and so do the factors of what was not measured, 1:
Blackwell, and float32 without TF32 from Ampere on.
"""


def page(result: dict[str, Any]) -> str:
    """Return the document that is made from a stored result."""
    found = [
        Checked(
            row=Public(**entry["row"]), held=entry["held"], seconds=entry["seconds"], peak_seconds=entry["peak_seconds"]
        )
        for entry in result["config"]["checked"]
    ]
    titles = {entry["row"]["card"]: entry["title"] for entry in result["config"]["checked"]}
    environment = result["environment"]
    lines = [
        _INTRODUCTION,
        _summary(found),
        "",
        "Models, cards and sources are in both halves. What is new to a fit it predicts less well; by fits to all rows",
        "but those that have it in common:",
        "",
        _left_out(result["config"]["left_out"]),
        "",
        "![Predicted against public step times](images/calibration.png)",
        "",
        "## Where it is off by more than 25%",
        "",
        *_far(found),
        "",
        "## Against this project's own measurements",
        "",
        *_own([Own(**entry) for entry in result["config"]["own"]]),
        "",
        "## All measurements",
        "",
        (
            "Milliseconds of one step, with the optimizer's update where the source includes it; *at the peaks*: what "
            "the datasheet's figures alone give. Held rows are bold."
        ),
        "",
        *_table(found, titles),
        "",
        "## Numbers",
        "",
        _AFTER,
        *_numbers(result["config"]["fit"]),
        "",
        "## Sources",
        "",
        *(f"- {key}: {text}." for key, text in result["config"]["sources"].items()),
        "",
        f"Recorded with: {versions(environment)}. Commit: {environment['commit']}.",
    ]
    return "\n".join(lines).rstrip() + "\n"


def _summary(found: list[Checked]) -> str:
    lines = []
    for name, held in (("fitted", False), ("**held out**", True)):
        chosen = [checked for checked in found if checked.held is held]
        errors, peak_errors = [c.error for c in chosen], [c.peak_error for c in chosen]
        num_close = sum(checked.is_close for checked in chosen)
        lines.append((
            name, str(len(chosen)), f"{num_close} ({100 * share_close(errors):.0f}%)",
            f"{100 * median_error(errors):.0f}%", f"{100 * max(errors, key=abs):+.0f}%",
            f"{100 * share_close(peak_errors):.0f}%", f"{100 * median_error(peak_errors):.0f}%",
        ))  # fmt: skip
    header = ("half", "measurements", "within 25%", "median error", "largest error", "at the peaks: within 25%")
    return markdown((*header, "median error"), lines)


def _left_out(errors: dict[str, list[float]]) -> str:
    lines = []
    for name in LEFT_OUT:
        found = errors[name]
        num_close = sum(abs(error) <= CLOSE for error in found)
        lines.append((
            f"the same {name}", f"{num_close} of {len(found)} ({100 * share_close(found):.0f}%)",
            f"{100 * median_error(found):.0f}%", f"{100 * max(found, key=abs):+.0f}%",
        ))  # fmt: skip
    return markdown(("left out", "within 25%", "median error", "largest error"), lines)


_OWN = """\
Plain steps of `python -m benchmarks gpu` in milliseconds: forward and backward, in float32 without TF32, images as they
are by default. No such step on Ampere or later is in the fit. Where the device itself is at hand, op times are measured
there, and modelled ones are not used.
"""


def _own(steps: list[Own]) -> list[str]:
    lines = []
    for step in steps:
        lines.append((
            step.model, str(step.sizes["batch_size"]), step.device, step.torch_version, _milliseconds(step.seconds),
            _milliseconds(step.modelled_seconds), f"{100 * step.error:+.0f}%",
        ))  # fmt: skip
    return [_OWN, markdown(("model", "batch", "device", "torch", "measured", "predicted", "error"), lines)]


_REASONS = {
    "vgg": (
        "VGG's large 3x3 convolutions ran at twice the rate of other networks' on plain cores; both are one kind here"
    ),
    "resnet50 b16": (
        "the reverse: 1x1 convolutions on a batch of 16 are slower than the VGGs that are fitted with them on this card"
    ),
    "wide-resnet50-2": (
        "it reaches 86% of the datasheet's arithmetic rate over the whole step, the narrower ResNet-50 42%; its wide "
        "convolutions and narrow ones are one kind here"
    ),
    "mobilenetv2": (
        "its depthwise convolutions are at the prior, since both networks that have such fell in the held half"
    ),
}
"""By how a name begins: why the prediction is far."""


def _far(found: list[Checked]) -> list[str]:
    lines = []
    for checked in found:
        if abs(checked.error) > CLOSE:
            name = checked.row.name
            reason = next((text for start, text in _REASONS.items() if name.startswith(start)), "unexplained")
            half = "held" if checked.held else "fitted"
            lines.append(f"- {name}, {half}, {100 * checked.error:+.0f}%: {reason}.")
    return lines or ["None."]


def _table(found: list[Checked], titles: dict[str, str]) -> list[str]:
    header = ("model", "batch", "precision", "card", "source", "its figure", "public", "predicted", "error")
    lines = []
    notes: dict[str, int] = {}
    for checked in found:
        row = checked.row
        mark = f" [{notes.setdefault(row.note, len(notes) + 1)}]" if row.note else ""
        cells = (
            row.model, str(row.batch_size), _precision(row), titles[row.card], row.source, row.figure + mark,
            _milliseconds(row.seconds), _milliseconds(checked.seconds), f"{100 * checked.error:+.0f}%",
            f"{100 * checked.peak_error:+.0f}%",
        )  # fmt: skip
        lines.append(tuple(f"**{cell}**" for cell in cells) if checked.held else cells)
    return [
        markdown((*header, "at the peaks"), lines),
        "",
        *(f"[{number}] {text}.  " for text, number in notes.items()),
    ]


def _precision(row: Public) -> str:
    if row.precision != "amp":
        return row.precision.replace("tf32", "TF32")
    return "half" if row.casting == "model" else f"AMP, {row.layout.upper()}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _numbers(fit: dict[str, Any]) -> list[str]:
    kinds = ("convolution", "depthwise", "matmul", "attention", "recurrent")
    shares = ((core, *(f"{of[kind]:g}" for kind in kinds)) for core, of in fit["shares"].items())
    factors, bandwidths = (
        ((key, f"{factor:g}") for key, factor in fit[name].items()) for name in ("factors", "bandwidth_factors")
    )
    return [
        markdown(("cores", *kinds), shares),
        "",
        markdown(("generation, cores", "factor"), factors),
        "",
        markdown(("generation", "factor of memory bandwidth"), bandwidths),
        "",
        (
            f"Reductions and normalizations reach {fit['reduction_bandwidth']:g} of the memory's bandwidth, all else "
            f"{fit['elementwise_bandwidth']:g}, times the factor; a launch takes {1e6 * fit['launch_seconds']:g} us."
        ),
    ]

"""The parts of the page that are text: heading, key figures and tables. HTML is returned escaped, plain text is not."""

from __future__ import annotations

import re

from lightning_offload._version import __version__
from lightning_offload.graph.memory_plan import AT_PACK, ON_DEMAND
from lightning_offload.report.bar_plots import WORDS, measured_rows
from lightning_offload.report.html import cell, table
from lightning_offload.report.plan_view import MeasuredStep, PlanView, Stored, bytes_by_action
from lightning_offload.report.scale import escape, format_share, or_dash
from lightning_offload.units import format_budget, format_bytes, format_seconds

__all__ = ["figures", "footer", "heading", "in_words", "lead", "measured_table", "storages_table"]

_NUM_STORAGES = 20  # rows of the table
_DOT = re.compile(r"(?<=\w)([._])(?=[A-Za-z_])")
"""Where a long name may be broken."""


def heading(view: PlanView) -> str:
    """What the report is about, as plain text."""
    budget = view.plan.budget_bytes
    within = f" within {format_budget(budget)}" if budget is not None else ""
    return f"Policy {view.plan.policy}{within} on {view.device.name}"


def lead(view: PlanView) -> str:
    """What the plan achieves, in one or two sentences of plain text."""
    plan, saved = view.plan, view.plain.peak_bytes - view.planned.peak_bytes
    peak = f"The step peaks at {format_bytes(view.planned.peak_bytes)}"
    if saved > 0:
        share = saved / view.plain.peak_bytes
        peak += f" in place of {format_bytes(view.plain.peak_bytes)}, {100 * share:.0f}% less"
    else:
        peak += ", as with everything kept"
    time = f"takes {format_seconds(view.planned.step_seconds)} ({format_share(view.overhead)})"
    text = f"{peak}, and {time}."
    if plan.budget_bytes is not None and view.planned.peak_bytes > plan.budget_bytes:
        text += f" That is over the budget by {format_bytes(view.planned.peak_bytes - plan.budget_bytes)}."
    return text


def footer(view: PlanView) -> str:
    """Where the figures come from."""
    graph = view.graph
    return (
        f"Simulated for {view.device.name}: {len(graph.ops)} ops, {len(view.stored)} saved storages, "
        f"{format_bytes(graph.persistent_bytes)} of persistent state. Graph {view.plan.graph_digest[:12]}, "
        f"lightning-offload {__version__}."
    )


# ---- key figures


def figures(view: PlanView) -> str:
    """The key figures as cards, measured ones beside predicted ones."""
    cards = [_card(*row) for row in _figure_rows(view)]
    return f'<dl class="figures">\n{"".join(cards)}{_split(view)}</dl>'


def _figure_rows(view: PlanView) -> list[tuple[str, str, str, bool]]:
    """Label, value, what stands beneath it, and whether it is a cause for alarm."""
    plan, m = view.plan, view.measured or MeasuredStep()
    budget, peak = plan.budget_bytes, view.planned.peak_bytes
    measured_peak = m.peak_bytes
    over = budget is not None and max(peak, measured_peak or 0) > budget
    disk = f"{format_bytes(plan.predicted_disk_bytes)} on disk" if plan.predicted_disk_bytes else "for swapped bytes"
    seconds = view.planned.stall_seconds
    stalls = f"{format_seconds(seconds)} of stalls" if seconds else "no stalls"
    used = f"{100 * peak / budget:.1f}% of the budget" if budget else ""
    engine, _, why = (m.engine or "").partition(": ")
    return [
        ("budget", format_budget(budget) if budget is not None else "none", f"on {view.device.name}", False),
        ("predicted peak", format_bytes(peak), _measured(measured_peak, "bytes") or used, over),
        ("plain peak, everything kept", format_bytes(view.plain.peak_bytes),
         f"{format_bytes(view.graph.persistent_bytes)} of it persistent", False),
        ("floor", format_bytes(plan.floor_bytes), f"set by {plan.floor_op}", False),
        ("predicted step time", format_seconds(view.planned.step_seconds), _measured(m.step_seconds, "seconds")
         or f"{format_seconds(view.plain.step_seconds)} with everything kept", False),
        ("overhead", format_share(view.overhead), stalls, False),
        ("gap to the bound", format_share(view.gap_to_bound),
         f"no plan takes less than {format_seconds(plan.bound_seconds)}", False),
        ("host memory", format_bytes(plan.predicted_host_bytes), _measured(m.host_peak_bytes, "bytes") or disk, False),
        *([("engine", engine, why, False)] if engine else []),
    ]  # fmt: skip


def _measured(value: float | None, kind: str) -> str:
    return f"last measured: {or_dash(value, kind)}" if value is not None else ""


def _card(label: str, value: str, beside: str, alarm: bool) -> str:
    breakable = _DOT.sub(r"\1<wbr>", escape(beside))
    extra = f'<dd class="beside">{breakable}</dd>' if beside else ""
    name = "value over" if alarm else "value"
    return f'<div class="figure"><dt>{escape(label)}</dt><dd class="{name}">{escape(value)}</dd>{extra}</div>\n'


def _split(view: PlanView) -> str:
    """How the saved bytes are divided, as a bar and in words."""
    sizes = bytes_by_action(view.stored)
    total = sum(sizes.values())
    if not total:
        return ""
    bars = "".join(f'<i class="{a}" style="width:{100 * size / total:.2f}%"></i>' for a, size in sizes.items())
    words = "".join(
        f'<span><span class="dot {a}"></span>{WORDS[a]} {format_bytes(size)} ({100 * size / total:.0f}%)</span>'
        for a, size in sizes.items()
    )
    return (
        f'<div class="figure wide"><dt>saved by autograd: {format_bytes(total)} in {len(view.stored)} storages</dt>'
        f'<dd><div class="split" aria-hidden="true">{bars}</div><div class="key">{words}</div></dd></div>\n'
    )


# ---- tables


def measured_table(view: PlanView) -> str:
    """Predicted beside measured, with the difference."""
    rows = []
    for label, kind, predicted, measured in measured_rows(view):
        known = bool(predicted) and measured is not None
        difference = format_share(measured / predicted - 1) if known and predicted and measured is not None else "n/a"
        rows.append([cell(label), _number(or_dash(predicted, kind)), _number(or_dash(measured, kind)),
                     _number(difference)])  # fmt: skip
    return table(("", "predicted", "measured", "difference"), rows, {1, 2, 3})


def storages_table(view: PlanView) -> str:
    """The largest saved storages."""
    largest = sorted(view.stored, key=lambda stored: (-stored.num_bytes, stored.pack_tick))[:_NUM_STORAGES]
    rows = []
    for stored in largest:
        what, how = in_words(stored)
        rows.append([
            _number(format_bytes(stored.num_bytes)),
            f'<td class="name" data-label="saved by"><code>{escape(stored.module or "(no module)")}</code></td>',
            f'<td class="name" data-label="made by"><code>{escape(stored.op or "(input)")}</code></td>',
            f'<td class="short"><span class="dot {stored.action}"></span>{escape(what)}</td>',
            cell(how),
        ])  # fmt: skip
    return table(("size", "saved by", "made by", "decision", "how"), rows, {0}, stacks=True)


def in_words(stored: Stored) -> tuple[str, str]:
    """What a plan does with a storage, and how."""
    decision = stored.decision
    if decision is None or decision.action == "keep":
        return "kept", ""
    if decision.action == "recompute":
        return "recomputed", "replayed, then kept for its own reads" if decision.memo else "replayed at each read"
    release = "at its pack" if decision.release_op == AT_PACK else f"before op {decision.release_op}"
    back = "on demand" if decision.prefetch_unpack == ON_DEMAND else f"at unpack {decision.prefetch_unpack}"
    return f"swapped to {decision.tier}", f"released {release}, brought back {back}"


def _number(text: str) -> str:
    return f'<td class="number">{escape(text)}</td>'

"""Shows a plan and what came of it: an HTML page with plots, a trace for Perfetto, tables for a terminal.

It looks at graphs, plans and measured figures, and changes none of them.
"""

from __future__ import annotations

from lightning_offload.report.page import save_plan_html
from lightning_offload.report.plan_view import MeasuredStep, PolicyOutcome, compare_policies
from lightning_offload.report.tables import comparison_table, render_text
from lightning_offload.report.trace import save_plan_trace

__all__ = [
    "MeasuredStep",
    "PolicyOutcome",
    "compare_policies",
    "comparison_table",
    "render_text",
    "save_plan_html",
    "save_plan_trace",
]

"""Says what a plan is, for adapters of loops that are the user's own: what Lightning's ModelSummary is the place for.

What the budget is when a model is followed, and what the plan is as soon as it is final, each once; as lines of the
logger ``lightning_offload``, which shows them as Lightning's shows its own, unless the program has set logging up.
``logging.getLogger("lightning_offload").setLevel(logging.WARNING)`` silences them. Processes that are not the main one
are silent.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning_offload.plugins.report import TITLE, plan_rows
from lightning_offload.report.fields import plain_table
from lightning_offload.units import format_budget

if TYPE_CHECKING:
    from lightning_offload.plugins.memory import MemoryPlugin

_log = logging.getLogger("lightning_offload")


def budget_line(memory: MemoryPlugin) -> str:
    """What the budget of a plugin is, which has one, on a device that is known."""
    budget_bytes = memory.budget_bytes
    assert budget_bytes is not None
    budget = format_budget(budget_bytes, memory.budget)
    return f"Offload budget: {budget} on {memory.device}, planned in the first steps"


def no_budget_line(memory: MemoryPlugin, name: str, *, call: str | None = None) -> str:
    """What is wrong where there is no budget.

    Args:
        memory: The plugin.
        name: What the user made.
        call: How a budget is given to that; by default as its keyword.
    """
    given = call or f"{name}(budget='4GiB')"
    return (
        f"{name} has no budget and the memory of the device '{memory.device}' is not limited: every tensor is kept. "
        f"Pass a budget, such as {given}, or set LIGHTNING_OFFLOAD_BUDGET=4GiB."
    )


class Announcer:
    """Says once what the budget is and, later, what the plan is.

    Args:
        memory: The plugin, whose device is known.
        name: What the user made, for messages.
        call: How a budget is given to that; by default as its keyword.
    """

    def __init__(self, memory: MemoryPlugin, name: str, call: str | None = None) -> None:
        self._is_done = memory.budget_bytes is None
        _show_lines()
        if self._is_done:
            _log.warning(no_budget_line(memory, name, call=call))
        else:
            _log.info(budget_line(memory))

    def tell_plan(self, memory: MemoryPlugin) -> None:
        """Tell the plugin's plan if it is final and was not told."""
        if not self._is_done and memory.phase == "planned":
            self._is_done = True
            _log.info("\n%s", plain_table(plan_rows(memory.report()), TITLE))


def _show_lines() -> None:
    """Have the lines shown where nobody has said what to do with lines of ours, as Lightning does."""
    if _log.level != logging.NOTSET:
        return
    _log.setLevel(logging.INFO)
    if not logging.root.handlers and not _log.handlers:
        _log.addHandler(logging.StreamHandler())
        _log.propagate = False

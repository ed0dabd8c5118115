"""Saved bytes by module, in forward order, in a number of rows that can be read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from lightning_offload.graph.memory_plan import Action
from lightning_offload.report.plan_view import Stored, bytes_by_action

__all__ = ["ModuleRow", "module_rows"]

UNNAMED = "(no module)"
_LARGE_PART = 0.3  # of all bytes: a module with more is split up


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """Saved bytes of a module, or of a run of modules.

    Attributes:
        label: Its name; of a run that of the first and of the last.
        num_bytes: By action.
        num_storages: How many storages they are.
    """

    label: str
    num_bytes: dict[Action, int]
    num_storages: int

    @property
    def total_bytes(self) -> int:
        """All saved bytes."""
        return sum(self.num_bytes.values())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Group:
    name: str
    depth: int
    stored: list[Stored]

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def total_bytes(self) -> int:
        return sum(stored.num_bytes for stored in self.stored)


def module_rows(stored: Sequence[Stored], max_rows: int = 24) -> list[ModuleRow]:
    """Group storages by module; while there is room, the heaviest and its siblings are opened into their children.

    Siblings are opened together, so that what is alike is shown alike; one that holds a large part of all bytes may be
    opened alone where there is no room for all.

    Args:
        stored: In forward order.
        max_rows: The most rows there may be.
    """
    groups = _split(_Group("", 0, list(stored)))
    total = sum(group.total_bytes for group in groups)
    closed: set[str] = set()
    while open_groups := [group for group in groups if group.name not in closed]:
        heaviest = max(open_groups, key=lambda group: group.total_bytes)
        siblings = [group for group in groups if group.parent == heaviest.parent]
        alone = [heaviest] if heaviest.total_bytes > _LARGE_PART * total else []
        opened = next((g for g in (siblings, alone) if g and _fits(groups, g, max_rows)), None)
        if opened is None:
            closed.add(heaviest.name)
            continue
        closed.update(group.name for group in opened)  # what a module saved itself keeps the module's name
        groups = [child for group in groups for child in (_split(group) if group in opened else [group])]
    groups.sort(key=lambda group: group.stored[0].pack_tick)
    return [_row(run) for run in _runs(groups, max_rows)]


def _fits(groups: list[_Group], opened: list[_Group], max_rows: int) -> bool:
    return len(groups) - len(opened) + sum(len(_split(group)) for group in opened) <= max_rows


def _split(group: _Group) -> list[_Group]:
    """By the next part of the names, in order of first appearance; what is the group's own keeps its name."""
    children: dict[str, _Group] = {}
    for stored in group.stored:
        parts = stored.module.split(".") if stored.module else [UNNAMED]
        name = ".".join(parts[: group.depth + 1])
        children.setdefault(name, _Group(name, group.depth + 1, [])).stored.append(stored)
    return list(children.values())


def _runs(groups: list[_Group], max_rows: int) -> list[list[_Group]]:
    """Neighbours together, as evenly as they go, where there are more than may be."""
    num = min(max_rows, len(groups))
    cuts = [len(groups) * i // num for i in range(num + 1)] if num else []
    return [groups[a:b] for a, b in itertools.pairwise(cuts)]


def _row(run: list[_Group]) -> ModuleRow:
    stored = [each for group in run for each in group.stored]
    return ModuleRow(
        label=run[0].name if len(run) == 1 else f"{run[0].name} … {run[-1].name}",
        num_bytes=bytes_by_action(stored),
        num_storages=len(stored),
    )

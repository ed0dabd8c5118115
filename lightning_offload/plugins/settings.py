"""The memory plugin's keywords, checked before anything is touched."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch

from lightning_offload.accelerators import memory_of, total_bytes_of
from lightning_offload.errors import BudgetError, OffloadError, PlanError, PolicyError, SpillError, type_of
from lightning_offload.graph.files import read_file, sibling_graph
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import check_policy
from lightning_offload.units import resolve_budget, resolve_host_budget

Budget = int | float | str | None
Tier = Literal["auto", "host", "disk"]
Verify = Literal["first", "always", "never"]

_log = logging.getLogger(__name__)
_SWITCH = "LIGHTNING_OFFLOAD"
_BUDGET = "LIGHTNING_OFFLOAD_BUDGET"
# Of a device's memory, where no budget is given:
_MARGIN = 0.05  # left for what the allocator rounds up, for kernels that are loaded late and for other libraries
_LEAST_MARGIN_BYTES = 1 << 30  # what a context, its kernels and workspaces of libraries take
_MOST_SLACK = 0.1  # counted as lost to fragmentation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Checked keywords of a memory plugin; cf. its docstring.

    The budget is that of the plan where none was given, and that of ``LIGHTNING_OFFLOAD_BUDGET`` in the environment
    where the plan has none either; ``plan_step`` is the step that lay beside the plan's file.
    """

    budget: Budget
    policy: str
    tier: Tier
    host_budget_bytes: int | None
    spill_dir: Path | None
    plan: MemoryPlan | None
    plan_step: StepGraph | None
    plan_name: str | None
    keep: tuple[str, ...]
    enabled: bool
    verify: Verify
    replace_checkpointing: bool
    chunked_loss: bool | str


def check_settings(
    *,
    budget: Budget,
    policy: str,
    tier: str,
    host_budget: Budget,
    spill_dir: str | os.PathLike[str] | None,
    plan: MemoryPlan | str | os.PathLike[str] | None,
    keep: str | Sequence[str],
    enabled: bool,
    verify: str,
    replace_checkpointing: bool = False,
    chunked_loss: bool | str = False,
) -> Settings:
    """Check the keywords of a memory plugin.

    Raises:
        BudgetError: A budget cannot be read.
        PolicyError: No such policy, or a keyword is none of the allowed words.
        PlanError: The plan file is missing or malformed, or the step beside it is malformed or another one.
        SpillError: The spill folder is missing or not writable, and would be used.
    """
    _check_budget(budget)
    _check_word("tier", tier, Tier)
    _check_word("verify", verify, Verify)
    _check_type("spill_dir", spill_dir, (str, os.PathLike), SpillError)
    _check_type("plan", plan, (str, os.PathLike, MemoryPlan), PlanError)
    _check_type("keep", keep, (str, Sequence), PolicyError)
    if any(not isinstance(pattern, str) for pattern in keep):
        raise PolicyError(f"keep={keep!r} is not understood: give patterns of module names, such as ['lm_head*']")
    if spill_dir is not None and tier != "host":
        check_spill_folder("spill_dir", Path(spill_dir))
    if tier == "disk" and host_budget is not None:
        raise PolicyError(
            f"host_budget={host_budget!r} means nothing with tier='disk': leave it out, or use tier='auto'"
        )
    if tier == "host" and spill_dir is not None:
        _log.info("spill_dir=%r is not used with tier='host', which has no disk", str(spill_dir))
    if not isinstance(replace_checkpointing, bool):
        raise PolicyError(f"replace_checkpointing={replace_checkpointing!r} is not known: choose True or False")
    if not isinstance(chunked_loss, (bool, str)):
        raise PolicyError(
            f"chunked_loss={chunked_loss!r} is not known: choose True or False, or name the layer that makes the logits"
        )
    found, step = _load_plan(plan)
    return Settings(
        budget=_asked_for(budget, found),
        policy=check_policy(policy),
        tier=tier,  # type: ignore[arg-type]
        spill_dir=Path(spill_dir).absolute() if spill_dir is not None else None,  # which is opened later
        host_budget_bytes=resolve_host_budget(host_budget),
        plan=found,
        plan_step=step,
        plan_name=os.fspath(plan) if isinstance(plan, (str, os.PathLike)) else None,
        keep=(keep,) if isinstance(keep, str) else tuple(keep),
        enabled=enabled and os.environ.get(_SWITCH, "1") != "0",
        verify=verify,  # type: ignore[arg-type]
        replace_checkpointing=replace_checkpointing,
        chunked_loss=chunked_loss,
    )


def _check_word(name: str, word: str, allowed: object) -> None:
    words = get_args(allowed)
    if word not in words:
        raise PolicyError(f"{name}={word!r} is not known: choose one of {', '.join(map(repr, words))}")


def _check_type(name: str, item: object, allowed: tuple[type, ...], error: type[OffloadError]) -> None:
    if item is not None and not isinstance(item, allowed):
        names = ", ".join(kind.__name__ for kind in allowed)
        raise error(f"{name}={item!r} is {type_of(item)}: give one of {names}")


def check_spill_folder(name: str, folder: Path) -> None:
    """Check that there is a folder that can be written to.

    Args:
        name: What the user calls it.
        folder: The folder.

    Raises:
        SpillError: There is none.
    """
    try:
        is_there = folder.is_dir()
    except OSError as error:  # of a folder on the way there, or of the name
        raise SpillError(f"{name} {str(folder)!r} cannot be used: {error.strerror}; name another") from None
    if not is_there:
        raise SpillError(f"{name} {str(folder)!r} is no folder: create it, or name one that exists")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpillError(f"{name} {str(folder)!r} is not writable: change its permissions, or name another")


def _check_budget(budget: Budget) -> None:
    if not isinstance(budget, float):
        resolve_budget(budget, device_bytes=None)
    elif not 0 < budget <= 1:
        resolve_budget(budget, device_bytes=1 << 40)


def _asked_for(budget: Budget, plan: MemoryPlan | None) -> Budget:
    """The budget that was given, else that of a plan, else that of the environment."""
    if budget is None and plan is not None:
        budget = _budget_of(plan)
    text = os.environ.get(_BUDGET, "").strip()
    if budget is not None or not text:
        return budget
    named: Budget = text
    if not text.isdecimal():
        with contextlib.suppress(ValueError):
            named = float(text)
    try:
        _check_budget(named)
    except BudgetError as error:
        raise BudgetError(f"the environment variable {_BUDGET}={text!r} is no budget: {error}") from None
    return named


def _budget_of(plan: MemoryPlan) -> Budget:
    """The budget that a plan was made for, as a user would write it."""
    return f"{plan.budget_bytes}B" if plan.budget_bytes is not None else None


def _load_plan(
    plan: MemoryPlan | str | os.PathLike[str] | None,
) -> tuple[MemoryPlan | None, StepGraph | None]:
    """A plan, with the step that lies beside its file."""
    if plan is None or isinstance(plan, MemoryPlan):
        return plan, None
    try:
        text = read_file(plan)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"plan {str(plan)!r} cannot be read: {error}; name a plan.json written by this package"
        ) from None
    try:
        found = MemoryPlan.from_json(text)
    except PlanError as error:
        raise PlanError(f"plan {str(plan)!r}: {error}") from None
    path = sibling_graph(plan)
    if not path.is_file():
        return found, None
    try:
        step = StepGraph.from_json(read_file(path))
    except (OSError, ValueError, PlanError) as error:
        raise PlanError(
            f"{str(path)!r}, the step of plan {str(plan)!r}, cannot be read: {error}; `lightning-offload plan "
            "--output` writes both"
        ) from None
    try:
        found.check(step)
    except PlanError:
        _log.warning("%r is the step of another plan than %r, and is not used", str(path), str(plan))
        return found, None
    return found, step


def budget_bytes_on(settings: Settings, device: torch.device, slack_bytes: int = 0) -> int | None:
    """The budget in bytes on a device; None where there is none, as on a CPU without ``budget=``.

    Args:
        settings: What was asked for.
        device: The device.
        slack_bytes: What its allocator was seen to hold beyond what was alive; not counted where a budget was given.

    Raises:
        BudgetError: A fraction was asked for of a device whose memory is not known.
    """
    total, memory = total_bytes_of(device), memory_of(device)
    if settings.budget is None and total is not None and memory is not None:
        margin_bytes = min(max(int(_MARGIN * total), _LEAST_MARGIN_BYTES), total // 4)
        lost_bytes = min(slack_bytes, int(_MOST_SLACK * total))
        return memory.free_bytes() + memory.reserved_bytes() - margin_bytes - lost_bytes
    return resolve_budget(settings.budget, device_bytes=total)

"""A program's own dispatch modes (``TorchDispatchMode``), which may change what the ops below them do.

A call is recorded below them, and made again below them. Modes that call themselves infrastructure (``is_infra_mode``)
stay on. Those by which torch counts and shows ops only look on: a call is recorded above them as well, and not shown to
them when it is made again.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_num_modes = torch._C._len_torch_dispatch_stack
_ONLOOKERS = ("torch.utils.flop_counter", "torch.utils._debug_mode", "torch.utils.module_tracker", "torch.distributed.")
"""Where those are defined."""


def may_change_ops() -> bool:
    """Whether ops of this thread go through modes that may change them; within a mode, through others below it."""
    return _num_modes() > 0 and not all(
        mode.is_infra_mode() or type(mode).__module__.startswith(_ONLOOKERS)
        for mode in _get_current_dispatch_mode_stack()
    )


def take_off() -> list[TorchDispatchMode]:
    """Take a program's modes off, with what :func:`put_back` puts on again; nothing where there are none."""
    stack = _get_current_dispatch_mode_stack() if _num_modes() else []
    if all(mode.is_infra_mode() for mode in stack):
        return []
    for _ in stack:
        _pop_mode()
    for mode in stack:
        if mode.is_infra_mode():
            _push_mode(mode)
    return stack


def put_back(stack: list[TorchDispatchMode]) -> None:
    """Have the modes on that were before :func:`take_off`."""
    if stack:
        while _num_modes():
            _pop_mode()
        for mode in stack:
            _push_mode(mode)

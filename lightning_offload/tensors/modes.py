"""A program's own dispatch modes (``TorchDispatchMode``), which may change what the ops below them do.

A call is recorded below them, and made again below them. Modes that call themselves infrastructure (``is_infra_mode``)
only look on.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_num_modes = torch._C._len_torch_dispatch_stack


def are_on() -> bool:
    """Whether ops of this thread go through modes of the program; within a mode, through others below it."""
    return _num_modes() > 0 and not all(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def take_off() -> list[TorchDispatchMode]:
    """Take a program's modes off, with what :func:`put_back` puts on again; nothing where there are none."""
    if not are_on():
        return []
    stack = _get_current_dispatch_mode_stack()
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

"""What ``torch.compile`` has made of the program: whether there is any, and whether it runs the op that was just seen.

Of a compiled region a mode sees what is left of its ops: calls of kernels that the compiler did not write itself, on
buffers that it allocates, uses again and writes out of sight. What such an op made may have been overwritten before it
is saved, so it is not replayed. A region that runs its ops one by one, as ``backend="aot_eager"`` does, hides nothing.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch
import torch._guards

_COMPILING: Any = torch._guards._TLS
_REGION = "torch._functorch._aot_autograd"
_TRACED = "<eval_with_key>"
_BETWEEN = ("lightning_offload.", "torch._ops", "torch.utils._", "torch.fx", "torch.overrides")


def is_in_use() -> bool:
    """Whether anything in this process is to be compiled where it is called, if it has not been yet."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(dynamo.cached_backends.values())  # one is none: for what it must not compile


_num_idle = 0
"""Of the ways to compile that this process has, how many a step has not used."""


def may_run() -> bool:
    """Whether steps may call compiled code: something was compiled, or is to be where it is called.

    Libraries name functions for the compiler as they are imported (bitsandbytes) that most programs never call. A step
    in which nothing was compiled shows that.
    """
    global _num_idle
    if not is_in_use():
        _num_idle = 0
        return False
    _num_idle = min(_num_idle, _num_ways())  # torch._dynamo.reset() forgets them
    return _has_compiled() or _num_ways() > _num_idle


def note_step() -> None:
    """A step has ended."""
    global _num_idle
    if is_in_use() and not _has_compiled():
        _num_idle = _num_ways()


def _has_compiled() -> bool:
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(frames.input_codes.seen)


def _num_ways() -> int:
    return len(sys.modules["torch._dynamo.eval_frame"].cached_backends)


def is_being_made() -> bool:
    """Whether this thread compiles now, as it does for the first backward of a region: what runs is no part of it."""
    return getattr(_COMPILING, "compile_context", None) is not None or is_being_traced()


_PROXY = torch._C._TorchDispatchModeKey.PROXY


def is_being_traced() -> bool:
    """Whether this thread traces now, as operators of higher order do with the gradient of what they are given."""
    return torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(_PROXY) is not None


def is_inspecting() -> bool:
    """Whether a compiled region's own checks, made where it runs for the first time, call who asks."""
    name: str = sys._getframe(2).f_globals.get("__name__") or ""
    return name.startswith(_REGION)


def hides_writes() -> bool:
    """Whether the op under way belongs to a compiled region that writes out of sight; asked from within the op."""
    frame: FrameType | None = sys._getframe(1)
    is_traced = is_caller_known = False
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if not is_caller_known and not name.startswith(_BETWEEN):
            is_caller_known = True
            is_traced = frame.f_code.co_filename.startswith(_TRACED)
        if name.startswith(_REGION):
            return not is_traced
        frame = frame.f_back
    return False


_UNSOUND = (
    "torch._functorch.config.activation_memory_budget is {share}: torch.compile recomputes within its regions, and "
    "where one of them draws random numbers (dropout) it draws others then, so gradients are silently wrong (pytorch "
    "issue 190758, seen with torch 2.13); leave it at 1 and have the memory budget decide, or draw none in "
    "compiled code"
)


def check_recomputation() -> None:
    """Warn where the compiler recomputes by a budget of its own in a step that draws random numbers; every time."""
    config = sys.modules.get("torch._functorch.config")
    share = getattr(config, "activation_memory_budget", 1)
    if share < 1 and is_in_use():
        warnings.warn(_UNSOUND.format(share=share), stacklevel=2)

"""Lets a kernel call other ops as it does in plain PyTorch, though it was called from within a dispatch mode.

Note [keys inside a mode]: within ``__torch_dispatch__`` torch excludes, for the thread, every dispatch key that ranks
above a mode's. For the op at hand they have been served. But a kernel may call other ops on views that it makes itself
(``pinv`` multiplies by ``U.mH``), and those then find the keys ``Conjugate``, ``Negative`` and ``ZeroTensor`` excluded:
kernels that rely on them to have lazy bits resolved read conjugated memory as if it were not. The result is silently
wrong, under any mode. Only complex tensors can be conjugated, and only parts of those are negated, so ops that take
complex tensors have the three keys given back; all others run as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_offload.runtime.hooks import DisableTorchFunction, is_own_function_mode_alone

_Keys = torch._C.DispatchKeySet
_LAZY = _Keys(torch._C.DispatchKey.Conjugate) | _Keys(torch._C.DispatchKey.Negative)
_LAZY = _LAZY | _Keys(torch._C.DispatchKey.ZeroTensor)
_SEQUENCES = frozenset({list, tuple})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_Overload = torch._ops.OpOverload
_num_function_modes = torch._C._len_torch_function_stack
_AUTOCAST = torch._C.DispatchKey.AutocastCPU
_WITHIN_A_MODE = torch._C.DispatchKey.PythonTLSSnapshot
_BILINEAR = torch.ops.aten._trilinear.default


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op, within a mode or without one: Note [keys inside a mode]."""
    if _num_function_modes():
        with DisableTorchFunction():
            is_complex = takes_complex(args, kwargs)
            if is_own_function_mode_alone() and _runs_no_python(func, args):  # none that is to be seen
                return _call(func, args, kwargs, is_complex=is_complex)
        return _call(func, args, kwargs, is_complex=is_complex)
    if takes_complex(args, kwargs) or func is _BILINEAR:  # as in `call_unseen`, which would take a while to get to
        return _call(func, args, kwargs, is_complex=True)
    return (func._op if func.__class__ is _Overload else func)(*args, **kwargs)


def call_unseen(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op where no function mode would see it, as within ``DisableTorchFunction``."""
    if takes_complex(args, kwargs) or func is _BILINEAR:
        return _call(func, args, kwargs, is_complex=True)
    # What an overload calls: a third of the time that a tiny op takes is the way there.
    return (func._op if func.__class__ is _Overload else func)(*args, **kwargs)


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, is_complex: bool) -> Any:
    if not is_complex and func is not _BILINEAR:
        return func(*args, **kwargs)
    excluded = torch._C._dispatch_tls_local_exclude_set() - _LAZY
    if func is _BILINEAR and excluded.has(_WITHIN_A_MODE):
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            # As it was where the program called the op.
            is_on = not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOCAST)
        excluded = excluded - _Keys(_AUTOCAST) if is_on else excluded
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return func(*args, **kwargs)


def _runs_no_python(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether no code of the program's can run in a call: a subclass of tensors may have some."""
    for item in args:
        if isinstance(item, Tensor):
            if item.__class__ not in _PLAIN:
                return False
        elif item.__class__ in _SEQUENCES and item and not isinstance(item[0], int):
            return False
    return getattr(func, "namespace", "") == "aten"


def takes_complex(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a complex tensor is among the arguments of a call."""
    for item in args:
        kind = item.__class__
        if kind in _SEQUENCES:
            if item and item[0].__class__ is not int and _has_complex(item):
                return True
        elif (kind is Tensor or isinstance(item, Tensor)) and item.is_complex():
            return True
    return bool(kwargs) and _has_complex(kwargs.values())


def _has_complex(items: Any) -> bool:
    for item in items:
        if isinstance(item, Tensor):
            if item.is_complex():
                return True
        elif isinstance(item, (int, float)):  # sizes and strides: no tensor among them
            return False
        elif item.__class__ in _SEQUENCES and _has_complex(item):
            return True
    return False

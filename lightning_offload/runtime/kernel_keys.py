"""Lets a kernel call other ops as it does in plain PyTorch, though it was called from within a dispatch mode.

Note [keys inside a mode]: within ``__torch_dispatch__`` torch excludes, for the thread, every dispatch key that ranks
above a mode's. For the op at hand they have been served. But a kernel may call other ops on views that it makes itself
(``pinv`` multiplies by ``U.mH``), and those then find the keys ``Conjugate``, ``Negative`` and ``ZeroTensor`` excluded:
kernels that rely on them to have lazy bits resolved read conjugated memory as if it were not. The result is silently
wrong, under any mode. Only complex tensors can be conjugated, and only parts of those are negated, so ops that take
complex tensors have the three keys given back; all others run as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_offload.runtime.hooks import NotSeen, is_own_function_mode_alone

_Keys = torch._C.DispatchKeySet
_LAZY = _Keys(torch._C.DispatchKey.Conjugate) | _Keys(torch._C.DispatchKey.Negative)
_LAZY = _LAZY | _Keys(torch._C.DispatchKey.ZeroTensor)
_SEQUENCES = frozenset({list, tuple})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_AUTOCAST = torch._C.DispatchKey.AutocastCPU
_WITHIN_A_MODE = torch._C.DispatchKey.PythonTLSSnapshot
_BILINEAR = torch.ops.aten._trilinear.default


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op, within a mode or without one: Note [keys inside a mode]."""
    if not torch._C._len_torch_function_stack():
        return _call(func, args, kwargs, is_complex=_takes_complex(args, kwargs))
    with NotSeen():
        is_complex = _takes_complex(args, kwargs)
        if is_own_function_mode_alone() and _runs_no_python(func, args):  # none that is to be seen
            return _call(func, args, kwargs, is_complex=is_complex)
    return _call(func, args, kwargs, is_complex=is_complex)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_complex: bool) -> Any:
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


def _takes_complex(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for item in args:
        if item.__class__ in _SEQUENCES:
            if _has_complex(item):
                return True
        elif isinstance(item, Tensor) and item.is_complex():
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

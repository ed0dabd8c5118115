"""Puts Python functions in the place of torch's own kernels, for a while and for all threads.

What takes a kernel's place asks itself whether its thread is meant, and does what the kernel does if not. Where there
is no kernel, the dispatcher passes the call on under the keys below, with the thread's settings as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def overload_of(name: str) -> Any:
    """The overload of aten's by its name: ``sum.dim_IntList``, or ``dropout`` for the one without a name."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@contextlib.contextmanager
def replacing(key: str, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, aten's overloads of these names run these functions, under a dispatch key that has no kernel for them.

    Args:
        key: The dispatch key.
        functions: By name; each is given the keys that are left to dispatch on, and the call's arguments.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in functions.items():
            library.impl(name, function, key, with_keyset=True)
        yield
    finally:
        library._destroy()

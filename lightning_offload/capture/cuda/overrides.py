"""Puts Python functions in the place of torch's own kernels, for a while and for one thread.

Kernels are those of all threads, so what takes the place of one asks whose call it is. Where there is no kernel, the
dispatcher passes a call on under the keys below, with the thread's settings as they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def overload_of(name: str) -> Any:
    """The overload of aten's by its name: ``sum.dim_IntList``, or ``dropout`` for the one without a name."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does one thing in the thread that asks for it, and another in others."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else elsewhere)(*args, **kwargs)

    return call


@contextlib.contextmanager
def replacing(
    key: str, functions: Mapping[str, Callable[..., Any]], elsewhere: Callable[..., Callable[..., Any]]
) -> Iterator[None]:
    """Inside, aten's overloads of these names run these functions, under a dispatch key that has no kernel for them.

    Args:
        key: The dispatch key.
        functions: By name: what this thread's calls run.
        elsewhere: Makes of an overload what others' calls run.
        Both are given the keys that are left to dispatch on, and the call's arguments.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in functions.items():
            library.impl(name, in_this_thread(function, elsewhere(overload_of(name))), key, with_keyset=True)
        yield
    finally:
        library._destroy()

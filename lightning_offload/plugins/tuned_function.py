"""The user's training function that is tried at several batch sizes: whether it can be, and what it uses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from lightning_offload.errors import TuningError

__all__ = ["check_arguments", "check_function", "name_of", "variables_of"]


def check_function(function: Any) -> None:
    """Check that a call of it can train.

    Raises:
        TuningError: It is no function, or a call of it would only make a generator or a coroutine.
    """
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise TuningError(f"a {kind} cannot be decorated: write @{kind} above the decorator, not below it")
    if not callable(function):
        raise TuningError(
            f"{function!r} is a {type(function).__name__}, not a training function: decorate a function, as in "
            "@find_efficient_batch_size(starting_batch_size=64)"
        )
    called = getattr(function, "__call__", function)  # noqa: B004  # of an object that can be called
    for is_kind, what in (
        (inspect.isgeneratorfunction, "a generator"),
        (inspect.iscoroutinefunction, "a coroutine"),
        (inspect.isasyncgenfunction, "an asynchronous generator"),
    ):
        if is_kind(function) or is_kind(called):
            raise TuningError(
                f"`{name_of(function)}` does not train when it is called, it makes {what}: decorate a plain function"
            )


def check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that it can be called with a batch size in front of these arguments.

    Raises:
        TypeError: It cannot.
    """
    name = name_of(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a built-in; the call itself will tell
        return
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        takes = "no argument" if first is None else f"`{first}` first, which only a keyword can give"
        raise TypeError(f"`{name}` takes {takes}: its first argument has to be the batch size")
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"`{name}` cannot be called with these arguments ({error}): leave out the batch size, which is its first "
            "argument and given by the decorator, and give all others"
        ) from None


def name_of(function: Any) -> str:
    """What messages call it."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def variables_of(function: Callable[..., Any]) -> Iterator[Any]:
    """What a function uses by name, what it is bound to, and what the functions that it uses by name use.

    These are followed within the function's own module: what a library does with its variables is its own affair.
    """
    while isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    if not inspect.isroutine(function) and not isinstance(function, type):
        function = getattr(function, "__call__", function)  # noqa: B004  # an object that can be called
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield from (owner, *getattr(owner, "__dict__", {}).values())
    waiting = [inspect.unwrap(getattr(function, "__func__", function))]
    known: set[int] = set()
    while waiting:
        found = waiting.pop()
        if not isinstance(found, FunctionType) or id(found) in known:
            continue
        known.add(id(found))
        for value in _named_in(found):
            yield value
            if isinstance(value, FunctionType) and value.__module__ == found.__module__:
                waiting.append(value)


def _named_in(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield function.__globals__[name]


def _names(code: CodeType) -> set[str]:
    """Names in a function's code, and in that of the functions and comprehensions inside it."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)

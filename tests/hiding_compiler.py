"""A compiler for tests that does to who looks on what inductor does, in milliseconds.

Some ops of a region run out of sight, on memory that nobody sees allocated; others are seen. What an op gave, seen or
not, is written over where it is not needed any more, by its address. On a CPU.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

_POINTWISE = ("sin", "cos", "exp", "relu", "tanh", "sigmoid", "neg", "mul", "add", "clamp", "gelu")


class _Region(fx.Interpreter):
    """Runs a region's graph.

    Args:
        graph: It.
        share: The share of its ops that run out of sight.
        seed: Which.
    """

    def __init__(self, graph: fx.GraphModule, share: float, seed: int) -> None:
        super().__init__(graph)
        self._share, self._seed = share, seed
        self._given: set[int] = set()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run it on what it is given, which is not its own to overwrite."""
        self._given = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
        try:
            return super().run(*args, **kwargs)
        finally:
            self.env = {}  # which holds what it returns

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        overwritten = self._overwritten_by(n)
        if overwritten is not None:
            with _disable_current_modes():
                result = super().run_node(n).contiguous()
                ctypes.memmove(overwritten.data_ptr(), result.data_ptr(), result.nbytes)
                return overwritten
        if random.Random(f"{self._seed} {n.name}").random() < self._share:
            with _disable_current_modes():
                return super().run_node(n)
        return super().run_node(n)

    def _overwritten_by(self, n: fx.Node) -> Tensor | None:
        """The memory of an operand of a pointwise op, where that may have the result."""
        if not n.name.startswith(_POINTWISE):
            return None
        for operand in n.all_input_nodes:
            value, made = self.env.get(operand), n.meta.get("val")
            is_ours = operand.op == "call_function" and len(operand.users) == 1
            if not (is_ours and isinstance(value, Tensor) and isinstance(made, Tensor)):
                continue
            if not value.is_contiguous() or (value.shape, value.dtype, value.stride()) != (
                tuple(made.shape),
                made.dtype,
                made.stride(),
            ):
                continue
            storage = value.untyped_storage()
            others = (v for other, v in self.env.items() if other is not operand and isinstance(v, Tensor))
            if storage._cdata not in self._given.union(v.untyped_storage()._cdata for v in others):
                return value
        return None


def hiding(share: float = 0.6, seed: int = 0) -> Callable[..., Any]:
    """A backend for ``torch.compile``.

    Args:
        share: The share of ops that run out of sight.
        seed: Which.
    """

    def compile_graph(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        boxed: Callable[..., Any] = make_boxed_func(_Region(graph, share, seed).run)
        return boxed

    backend: Callable[..., Any] = aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph)
    return backend

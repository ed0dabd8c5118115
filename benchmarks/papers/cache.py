"""SuperNeurons' tensor cache: copies only when an allocation fails, against a copy of each CONV output in each step.

A step goes through the layers forward and backward. While a layer runs its tensors are locked; where its output (in
backward: its input's gradient) finds no room, the least recently used tensors that are not locked go to the host, and
come back when they are read. A dead tensor is freed at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.papers.layers import Layer
from benchmarks.papers.route import needs

_Tensor = tuple[str, int]
"""Output ("y") or gradient of the output ("dy") of a layer."""


def swap_always_bytes(layers: Sequence[Layer]) -> int:
    """Return the traffic of a step in which each CONV output goes out and comes back."""
    return 2 * sum(layer.num_bytes for layer in layers if layer.kind == "conv")


def cached_bytes(layers: Sequence[Layer], capacity_bytes: int) -> int:
    """Return the traffic of a step with the cache in that much memory, parameters aside; sequential nets only.

    Raises:
        ValueError: If the tensors of one layer do not fit.
    """
    cache = _Cache(capacity_bytes)
    last_read = {i: index for index in range(len(layers) - 1, -1, -1) for i in needs(layers, index)}
    for index, layer in enumerate(layers):
        cache.use([("y", i) for i in layer.inputs if i >= 0])
        cache.make(("y", index), layer.num_bytes)
        for i in (*layer.inputs, index):
            if i >= 0 and i not in last_read and (i < index or index == len(layers) - 1):
                cache.free(("y", i))
    cache.make(("dy", len(layers) - 1), layers[-1].num_bytes)
    for index in range(len(layers) - 1, -1, -1):
        cache.use([("dy", index), *(("y", i) for i in sorted(needs(layers, index)))])
        if layers[index].gradient_bytes:
            cache.make(("dy", index - 1), layers[index].gradient_bytes)
            cache.free(("dy", index))
        else:
            cache.rename(("dy", index), ("dy", index - 1))
        for i, last in last_read.items():
            if last == index:
                cache.free(("y", i))
    return cache.traffic_bytes


@dataclass
class _Cache:
    capacity_bytes: int
    traffic_bytes: int = 0
    on_device: OrderedDict[_Tensor, int] = field(default_factory=OrderedDict)
    on_host: dict[_Tensor, int] = field(default_factory=dict)
    locked: set[_Tensor] = field(default_factory=set)

    def use(self, tensors: Sequence[_Tensor]) -> None:
        """Begin a layer: lock what it reads, and bring back what is away."""
        self.locked = set(tensors)
        for tensor in tensors:
            if tensor in self.on_host:
                num_bytes = self.on_host.pop(tensor)
                self.traffic_bytes += num_bytes
                self._allocate(tensor, num_bytes)
            self.on_device.move_to_end(tensor)

    def make(self, tensor: _Tensor, num_bytes: int) -> None:
        self.locked.add(tensor)
        self._allocate(tensor, num_bytes)

    def rename(self, tensor: _Tensor, name: _Tensor) -> None:
        self.on_device[name] = self.on_device.pop(tensor)

    def free(self, tensor: _Tensor) -> None:
        self.on_device.pop(tensor, None)
        self.on_host.pop(tensor, None)

    def _allocate(self, tensor: _Tensor, num_bytes: int) -> None:
        while sum(self.on_device.values()) + num_bytes > self.capacity_bytes:
            victim = next((t for t in self.on_device if t not in self.locked), None)
            if victim is None:
                raise ValueError(f"{self.capacity_bytes} bytes do not hold the tensors of one layer")
            self.on_host[victim] = self.on_device.pop(victim)
            self.traffic_bytes += self.on_host[victim]
        self.on_device[tensor] = num_bytes

"""A simulated cluster: data parallelism over equal GPUs whose gradients are exchanged after backward."""

from __future__ import annotations


def ring_seconds(gradient_bytes: int, num_devices: int, bytes_per_second: float) -> float:
    """Return the duration of a ring all-reduce, bandwidth alone (Patarasuk and Yuan, JPDC 2009)."""
    return 2 * (num_devices - 1) / num_devices * gradient_bytes / bytes_per_second


def server_seconds(gradient_bytes: int, num_devices: int, bytes_per_second: float) -> float:
    """Return how long one parameter server takes to receive all gradients and to send all parameters."""
    return 2 * num_devices * gradient_bytes / bytes_per_second


def speed_up(step_seconds: float, exchange_seconds: float, num_devices: int) -> float:
    """Return samples a second of all devices over those of one, of which each has a batch of its own."""
    return num_devices * step_seconds / (step_seconds + exchange_seconds)

"""Observes steps: records them as graphs, measures their ops, peaks, and the device's links."""

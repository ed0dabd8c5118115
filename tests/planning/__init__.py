"""Choosing actions, on hand-made graphs and without torch."""

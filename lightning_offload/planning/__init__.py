"""Chooses keep, swap or recompute for every saved storage; pure functions over plain data, without torch."""

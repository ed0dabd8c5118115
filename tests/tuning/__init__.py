"""The memory plugin and its parts."""

"""Several processes with one process group: each test file launches its processes once, for many checks."""

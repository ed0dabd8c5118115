"""What only a GPU can answer: `make test-gpu`, or `python -m pytest -m gpu tests/gpu`.

To try the tests themselves where there is none: `LIGHTNING_OFFLOAD_TEST_DEVICE=cpu python -m pytest tests/gpu`
runs on the CPU all that a CPU can run; the rest is skipped.
"""

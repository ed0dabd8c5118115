"""An emulated CUDA device, and the tests that run on it: `make test-emulated`; README.md says what it is.

`build` builds it, `python -m tests.emulated_cuda` runs tests on it under several schedules, and `plugin` lets pytest
fail a test that left races behind. Tests of this folder are skipped where the device is not there.
"""

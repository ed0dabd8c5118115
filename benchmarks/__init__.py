"""Measurements behind the numbers in the documentation: `python -m benchmarks SUITE [--json]`.

registry.py     the suites by name; a new one is a module in suites/ and a line there
suites/         what is measured
gpu/            the cases of the suite `gpu`, and what runs them one by one
scale/          many devices, simulated: `python -m benchmarks.scale`
workloads.py    models and training steps to measure on
pairs.py        the method: interleaved pairs, median ratio, bootstrap interval
results.py      rows, the JSON line and the result files
environment.py  device, versions and commit that go with every result
tables.py       docs/performance.md from the result files: `python -m benchmarks tables`
"""

"""Other people's trainers and models, trained within a budget by their own entry points.

`python -m benchmarks.clients [NAME ...]`, or `make test-clients`, which makes an environment with their packages.
"""

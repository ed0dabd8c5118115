"""The suites: each module has a `TITLE` and `run(options, progress) -> Measurements`."""

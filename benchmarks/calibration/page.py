"""Stub."""
DOCUMENT = "calibration.md"
def page(result): return ""

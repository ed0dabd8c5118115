"""The memory plugin ties capture, planning and runtime together; adapters for frameworks rest on it."""

"""Steps, devices and plans as plain data."""

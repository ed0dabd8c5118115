"""The documentation is true: its code runs, its outputs are what is printed, its site builds."""

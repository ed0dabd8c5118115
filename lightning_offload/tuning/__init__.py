"""The tuner: the efficiency-optimal batch size, and the learning rate that goes with it. Knows no framework."""

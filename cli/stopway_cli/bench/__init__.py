"""Figures, never judgements: throughput, stop latency, and the core's cost of a turn."""

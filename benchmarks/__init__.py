"""Benchmarks through the public API: every figure is a ratio to a peer timed in the same run."""

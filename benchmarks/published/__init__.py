"""Published protocols, run with this package: ``python -m benchmarks.published ROW``."""

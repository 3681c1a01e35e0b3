"""Benchmarks of servers and of the engine: the parts of `python -m pagedjax.bench`."""

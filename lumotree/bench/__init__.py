"""Benchmarks of components, as library functions; the command line lives in `replay`."""

"""Numerical and sampling audits, and the faults that show how much they see."""

"""Arithmetic behind one table of functions; `reference` is the plain-torch definition of each."""

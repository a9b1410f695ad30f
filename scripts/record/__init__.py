"""Records the shipped corpora: a scripted coding agent at work on this repository's own code."""

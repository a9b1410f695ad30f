"""Speculative decoding on recurrent-hybrid language models: verify a tree, publish a path."""

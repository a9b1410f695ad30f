"""The recording proxy: a client's traffic passes through unchanged and becomes a corpus."""

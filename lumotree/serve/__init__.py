"""The OpenAI-compatible server over the in-process decoder."""

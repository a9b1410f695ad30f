"""The benchmark: recorded corpora replayed through arms, pooled, compared and drawn."""

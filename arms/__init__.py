"""Arms: the ways to serve one request that a replay compares. Imports run arms -> lumotree."""

"""The decode step as captured graphs over fixed buffers: what a CUDA device runs.

The stages, their order and the loop around them are those of lumotree.decoder; here each stage
is a run of kernel launches that reads everything that changes (tokens, prefix length, accepted
path, sampling parameters) from device memory, so that it is captured once and replayed.
"""

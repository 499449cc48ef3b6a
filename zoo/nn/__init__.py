"""Layers that families share: leaves only (a norm, a convolution, attention). Each family writes its own
blocks."""

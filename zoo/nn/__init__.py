"""Pieces that families share. Leaves only (a norm, a convolution, attention): each family shows its own
blocks."""

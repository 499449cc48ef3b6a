"""Requests, time and memory: serves any family of the zoo through its contract, and knows none by name."""

"""The server: requests, time and memory. It serves any family through the contract and knows none by name."""

"""How a plain function becomes a fast one. Knows no model and no server."""

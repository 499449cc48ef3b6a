"""Lower plain functions to fast ones and keep the compiled code. Knows no model and no server."""

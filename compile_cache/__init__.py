"""Lower plain functions to fast ones, and keep the compiled code. This package knows no model and no server."""

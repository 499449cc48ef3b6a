"""The command `zoo`, a file for each kind of command."""

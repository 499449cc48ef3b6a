"""Read a published checkpoint: its JSON files, its tensors and their names. Demo checkpoints are written
here."""

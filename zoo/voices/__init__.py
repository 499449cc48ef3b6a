"""Recordings of voices: checked, resampled, encoded once and kept."""

"""Reading a checkpoint's config.json, and changing one. Nothing is guessed: a key that is missing is an error that names it."""

from __future__ import annotations

from typing import Any


def need(config: dict[str, Any], key: str, where: str) -> Any:
    """config[key], or a ValueError that says which key of which block is missing."""
    if key not in config:
        raise ValueError(f"config.json: {where} has no {key!r}")
    return config[key]


def expect(config: dict[str, Any], where: str, **known: Any) -> None:
    """Raises ValueError for a key that says something this package does not build."""
    for key, value in known.items():
        if need(config, key, where) != value:
            raise ValueError(f"config.json: {where} has {key}={config[key]!r}; only {value!r} is known")


def change(config: dict[str, Any], changes: dict[str, Any], where: str) -> None:
    """Merge `changes` into `config`, block by block. Raises ValueError for a key that is not there to be changed."""
    for key, value in changes.items():
        if key not in config:
            raise ValueError(f"{where} has no {key!r}; it has: {', '.join(sorted(config))}")
        if isinstance(config[key], dict) and isinstance(value, dict):
            change(config[key], value, key)
        else:
            config[key] = value

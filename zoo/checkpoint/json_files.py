"""The JSON files next to a model's weights."""

import json
from pathlib import Path


def read_json(path: Path) -> dict:
    """Return the object in a JSON file. Raises ValueError with the path if it is absent or is not a JSON
    object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} cannot be read: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def read_config(directory: Path) -> dict:
    """Return a model's config.json, or {} if the directory has none: some families have no such file. Raises
    ValueError."""
    path = directory / "config.json"
    return read_json(path) if path.exists() else {}

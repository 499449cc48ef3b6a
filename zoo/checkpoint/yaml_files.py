"""Read a checkpoint's HyperPyYAML, which constructs and calls whatever its tags name. Nothing is called here:
the content of a tag is read as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

try:  # libyaml's parser is ten times as fast, and some files have 100,000 tokens
    from yaml import CSafeLoader as _Loader
except ImportError:
    from yaml import SafeLoader as _Loader


class _PlainLoader(_Loader):
    """A loader that replaces every tag by its content: `!new:some.Class` with a block becomes that block."""


def _plain(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    assert isinstance(node, yaml.ScalarNode)
    return loader.construct_scalar(node)


_PlainLoader.add_multi_constructor("!", _plain)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML object and resolve `!ref <name>` to top-level values. Raises ValueError."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _PlainLoader)  # this loader constructs nothing
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a YAML object")
    return {key: _resolved(value, values) for key, value in values.items()}


def _resolved(value: Any, top: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _resolved(inner, top) for key, inner in value.items()}
    if isinstance(value, str) and value.startswith("<") and value.endswith(">"):
        return top.get(value[1:-1], value)
    return value

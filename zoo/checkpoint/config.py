"""Read and change a checkpoint's JSON files. Nothing is guessed: every value has a type and a range, and a
value that is missing or out of range is an error that names it."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, replace
from typing import Any

# Wide ranges for values that most models have. They keep out values that would hang a loop or fill the
# memory.
LAYERS = (1, 1000)
MAX_WIDTH = 1 << 16
WIDTH = (1, MAX_WIDTH)
HEADS = (1, 1024)
HEAD_DIM = (2, 1024)
VOCABULARY = (1, 1 << 22)
POSITIONS = (1, 1 << 20)
CODEBOOKS = (1, 64)
KERNEL = (1, 256)
STRIDE = (1, 64)
RATE_HZ = (1000, 384_000)
EPS = (0.0, 1.0)
ROPE_THETA = (1.0, 1e12)

_brief = reprlib.Repr()
_brief.maxstring = 60


@dataclass(frozen=True)
class ConfigBlock:
    """An object of a JSON file. Each method reads a value and checks its range. It raises a one-line
    ValueError that names file, block and key, and says what was found and what is possible."""

    values: dict[str, Any]
    name: str = "the root"  # or its path from there: "talker_config.spk_id"
    file: str = "config.json"

    def get(self, key: str) -> Any:
        """Return a value of any type."""
        if key not in self.values:
            raise ValueError(f"{self.file}: {self.name} has no {key!r}")
        return self.values[key]

    def integer(self, key: str, low: int, high: int, step: int = 1) -> int:
        """Return an integer from `low` to `high` that is a multiple of `step`."""
        value = self.get(key)
        if not _is_integer(value, low, high) or value % step:
            kind = "an integer" if step == 1 else f"a multiple of {step}"
            raise self.refuse(key, f"{kind} from {low} to {high} is possible")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.get(key)
        if not _is_number(value, low, high):
            raise self.refuse(key, f"a number from {low:g} to {high:g} is possible")
        return value

    def integers(self, key: str, low: int, high: int, lengths: tuple[int, int] = (1, 16)) -> tuple[int, ...]:
        """Return a list of `lengths[0]` to `lengths[1]` integers."""
        values = self._list(key, lengths)
        if not all(_is_integer(value, low, high) for value in values):
            raise self.refuse(key, f"a list of integers from {low} to {high} is possible")
        return tuple(values)

    def numbers(self, key: str, low: float, high: float, lengths: tuple[int, int]) -> tuple[float, ...]:
        """Return a list of `lengths[0]` to `lengths[1]` numbers."""
        values = self._list(key, lengths)
        if not all(_is_number(value, low, high) for value in values):
            raise self.refuse(key, f"a list of numbers from {low:g} to {high:g} is possible")
        return tuple(values)

    def _list(self, key: str, lengths: tuple[int, int]) -> list[Any]:
        values, (low, high) = self.get(key), lengths
        if not isinstance(values, list) or not low <= len(values) <= high:
            count = str(low) if low == high else f"{low} to {high}"
            raise self.refuse(key, f"a list of {count} values is possible")
        return values

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false is possible")
        return value

    def string(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.refuse(key, "a string is possible")
        return value

    def block(self, key: str) -> ConfigBlock:
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.refuse(key, "an object is possible")
        return ConfigBlock(value, key if self.name == "the root" else f"{self.name}.{key}", self.file)

    def ids(self, key: str, rows: int) -> dict[str, int]:
        """Return lower-case names -> rows of a table with `rows` rows."""
        block = self.block(key)
        return {name.lower(): block.integer(name, 0, rows - 1) for name in block.values}

    def with_defaults(self, values: dict[str, Any]) -> ConfigBlock:
        """Return the block with `values` for the keys that it lacks."""
        return replace(self, values=values | self.values)

    def expect(self, **known: Any) -> None:
        """Raise ValueError if a key has a value that this package does not support."""
        for key, value in known.items():
            found = self.get(key)
            if type(found) is not type(value) or found != value:
                raise self.refuse(key, f"only {value!r} is known")

    def expect_product(self, key: str, product: int) -> None:
        """Raise ValueError if a key differs from the product of the block's rates."""
        if self.get(key) != product:
            raise self.refuse(key, f"the rates multiply to {product}")

    def expect_none(self, *keys: str) -> None:
        """Raise ValueError if a key enables a feature that this package does not support."""
        for key in keys:
            if self.values.get(key):
                raise self.refuse(key, "only null and false are known")

    def refuse(self, key: str, possible: str) -> ValueError:
        """Return the error for the value of an existing key."""
        name = _brief.repr(key)[1:-1]  # the key may be arbitrary, such as a voice's name
        return ValueError(f"{self.file}: {self.name} has {name}={_brief.repr(self.values[key])}; {possible}")


def _is_integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # false for a bool


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high  # false for NaN


def change(config: dict[str, Any], changes: dict[str, Any], where: str) -> None:
    """Merge `changes` into `config`, block by block. Raises ValueError for a key that `config` lacks."""
    for key, value in changes.items():
        if key not in config:
            raise ValueError(f"{where} has no {key!r}; it has: {', '.join(sorted(config))}")
        if isinstance(config[key], dict) and isinstance(value, dict):
            change(config[key], value, key)
        else:
            config[key] = value

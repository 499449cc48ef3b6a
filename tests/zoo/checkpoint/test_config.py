"""Reading a JSON block: each kind of value, and the error for a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zoo.checkpoint.config import ConfigBlock, change

NAN = float("nan")
READ: dict[str, Callable[[ConfigBlock], Any]] = {
    "an integer from 2 to 8": lambda block: block.integer("x", 2, 8),
    "a multiple of 4 from 2 to 8": lambda block: block.integer("x", 2, 8, step=4),
    "a number from 0 to 1.5": lambda block: block.number("x", 0, 1.5),
    "a list of integers from 2 to 8": lambda block: block.integers("x", 2, 8, lengths=(0, 3)),
    "a list of 1 to 2 values": lambda block: block.integers("x", 2, 8, lengths=(1, 2)),
    "a list of 2 values": lambda block: block.integers("x", 2, 8, lengths=(2, 2)),
    "a list of numbers from 0 to 1.5": lambda block: block.numbers("x", 0, 1.5, lengths=(1, 3)),
    "true or false": lambda block: block.flag("x"),
    "a string": lambda block: block.string("x"),
    "an object": lambda block: block.block("x"),
}
TAKEN: dict[str, tuple[tuple[Any, Any], ...]] = {
    "an integer from 2 to 8": ((2, 2), (8, 8)),
    "a multiple of 4 from 2 to 8": ((4, 4), (8, 8)),
    "a number from 0 to 1.5": ((0, 0), (1.5, 1.5)),
    "a list of integers from 2 to 8": (([], ()), ([2, 8, 3], (2, 8, 3))),
    "a list of 1 to 2 values": (([2], (2,)),),
    "a list of 2 values": (([2, 2], (2, 2)),),
    "a list of numbers from 0 to 1.5": (([1, 0.5], (1, 0.5)),),
    "true or false": ((True, True), (False, False)),
    "a string": (("", ""),),
    "an object": (({"y": 1}, ConfigBlock({"y": 1}, "where.x", "a.json")),),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "an integer from 2 to 8": (1, 9, 10**9, 2.0, True, "5", None, [], NAN),
    "a multiple of 4 from 2 to 8": (6, 12, 0),
    "a number from 0 to 1.5": (-1, 2, True, "1", None, NAN, float("inf"), [1]),
    "a list of integers from 2 to 8": ([1], [2, None], [2.0], [True]),
    "a list of 1 to 2 values": ([], [2, 2, 2], 2, {}, None, "22"),
    "a list of 2 values": ([2],),
    "a list of numbers from 0 to 1.5": ([NAN], [0, "1"]),
    "true or false": (0, 1, None, "true"),
    "a string": (5, None),
    "an object": ([], None, "x", 1),
}


@pytest.mark.parametrize("kind", READ)
def test_a_possible_value_is_returned_unchanged(kind):
    for value, read in TAKEN[kind]:
        found = READ[kind](ConfigBlock({"x": value}, "where", "a.json"))
        assert found == read and type(found) is type(read)


@pytest.mark.parametrize("kind", READ)
def test_a_refused_value_is_named(kind):
    for value in REFUSED[kind]:
        with pytest.raises(ValueError) as error:
            READ[kind](ConfigBlock({"x": value}, "where", "a.json"))
        assert str(error.value) == f"a.json: where has x={value!r}; {kind} is possible"
    with pytest.raises(ValueError, match=r"^a\.json: where has no 'x'$"):
        READ[kind](ConfigBlock({}, "where", "a.json"))


def test_ids():
    block = ConfigBlock({"spk_id": {"Anna": 0, "uncle_fu": 9}})
    assert block.ids("spk_id", 10) == {"anna": 0, "uncle_fu": 9}
    with pytest.raises(
        ValueError, match=r"^config\.json: spk_id has uncle_fu=9; an integer from 0 to 8 is possible$"
    ):
        block.ids("spk_id", 9)


def test_an_error_is_one_short_line_for_any_value():
    with pytest.raises(ValueError) as error:
        ConfigBlock({"x": {"a\nb" * 1000: list(range(10**5))}}).block("x").string("a\nb" * 1000)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_only_known_values_are_expected():
    block = ConfigBlock({"bias": False, "layers": 1})
    block.expect(bias=False, layers=1)
    block.expect_none("bias", "absent")
    for known, message in (
        ({"bias": True}, "bias=False; only True"),
        ({"bias": 0}, "bias=False; only 0"),
        ({"layers": 2}, "layers=1; only 2"),
    ):
        with pytest.raises(ValueError, match=message):
            block.expect(**known)
    with pytest.raises(ValueError, match="layers=1; only null and false are known"):
        block.expect_none("layers")


def test_a_key_must_be_the_product_of_the_rates():
    block = ConfigBlock({"hop": 320}, "codec")
    block.expect_product("hop", 320)
    with pytest.raises(ValueError, match="codec has hop=320; the rates multiply to 640"):
        block.expect_product("hop", 640)


def test_changes_reach_into_blocks_and_add_no_key():
    config = {"codec": {"hop": 320, "rates": [2]}, "name": {"a": 1}}
    change(config, {"codec": {"rates": [4, 2]}, "name": "b"}, "config.json")
    assert config == {"codec": {"hop": 320, "rates": [4, 2]}, "name": "b"}
    with pytest.raises(ValueError, match="codec has no 'hops'; it has: hop, rates"):
        change(config, {"codec": {"hops": 1}}, "config.json")

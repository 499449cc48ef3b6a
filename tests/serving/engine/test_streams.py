"""What launches read, many numbers in one copy, and what comes back."""

import time

import numpy as np
import pytest
import torch

from serving.engine.device.streams import ALIGNED, AsyncCopy, as_int64, parts


def packed(fields):
    numbers = [as_int64(value).astype(np.int64) for value in fields.values()]
    sizes = [-(-len(value) // ALIGNED) * ALIGNED for value in numbers]
    place = torch.full((sum(sizes) + 4,), -1, dtype=torch.int64)
    for part, value in zip(place.split([*sizes, 4]), numbers, strict=False):
        part[: len(value)] = torch.from_numpy(value)
    return place, sizes


FIELDS = {
    "slots": np.array([3, 1, 2]),
    "page_table": np.arange(15).reshape(3, 5),
    "is_last": np.array([True, False, True]),
    "kv_lens": np.array([7]),
    "block_tables": np.arange(-7, 8, dtype=np.int32).reshape(3, 5),  # an odd number of them
    "seq_lens": np.array([9], np.int32),
}
DTYPES = {np.dtype(bool): torch.bool, np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def test_parts_are_views_of_the_place_in_the_fields_shapes():
    place, sizes = packed(FIELDS)
    found = parts(place, FIELDS, sizes)
    for name, value in FIELDS.items():
        assert found[name].dtype == DTYPES[value.dtype] and found[name].is_contiguous() == (
            value.dtype != bool
        )
        assert np.array_equal(found[name].numpy(), value)
        assert found[name].data_ptr() % 16 == place.data_ptr() % 16
    place.zero_()
    assert not any(part.any() for part in found.values())


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_nested_region_takes_parts(mode):
    """It refuses two inputs that share a storage, on any device."""

    @torch.compiler.nested_compile_region
    def layer(x, lens, edges):
        return x + lens.sum() * edges[-1]

    def step(x, lens, edges):
        return layer(layer(x, lens, edges), lens, edges)

    place, sizes = packed(FIELDS)
    with mode():
        found = parts(place, FIELDS, sizes)
        arguments = torch.zeros(2), found["kv_lens"], found["slots"]
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*arguments), step(*arguments))


class Arriving(AsyncCopy):
    """Values that are there at a look."""

    def __init__(self, at_look):
        super().__init__(())
        self.looks_left = at_look

    @property
    def is_there(self):
        self.looks_left -= 1
        return self.looks_left <= 0


def test_a_wait_ends_with_the_values_or_with_its_time():
    soon, late = Arriving(at_look=3), Arriving(at_look=10**9)
    soon.wait(60)
    assert soon.looks_left == 0
    began_s = time.perf_counter()
    late.wait(0.002)
    assert time.perf_counter() - began_s >= 0.002 and not late.is_there

"""Fixtures for tests of the modules and their kernels."""

import pytest
import torch

from zoo import kernels


@pytest.fixture
def built():
    """The CPU's kernels, in inference mode; the number of threads may change meanwhile."""
    kernels.build()
    before = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)

from pathlib import Path

import pytest
import torch

from zoo.cosyvoice2.flow import zeros

STATM = Path("/proc/self/statm")


@pytest.mark.skipif(not STATM.exists(), reason="memory is read in /proc")
def test_what_nobody_wrote_takes_no_memory():
    def resident_pages() -> int:
        return int(STATM.read_text().split()[1])

    before = resident_pages()
    made = zeros(torch.ones(1, dtype=torch.bfloat16), 4, 32 << 20)  # 256 MiB
    assert (resident_pages() - before) * 4096 < 32 << 20
    assert made.shape == (4, 32 << 20) and made.dtype == torch.bfloat16
    assert not made[2, -5:].any()
    made[2, -5:] = 1
    assert made[2].sum() == 5

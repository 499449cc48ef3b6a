"""Merging two lanes."""

import torch

from zoo.nn.guidance import merge

COND, NULL = torch.tensor([[1.0, 2.0], [3.0, -4.0]]), torch.tensor([[0.5, 1.0], [-1.0, 4.0]])


def test_each_row_has_its_own_weight():
    merged = merge(torch.cat((COND, NULL)), torch.tensor([3.0, 0.0]))
    torch.testing.assert_close(merged, torch.tensor([[2.0, 4.0], [-1.0, 4.0]]))


def test_a_weight_of_one_is_the_first_lane_to_the_last_bit():
    scores = torch.randn(6, 4, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(merge(scores, torch.ones(3)), scores[:3])


def test_each_stream_has_its_own_weight():
    scores = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([[1.0, 2.0, 0.0], [1.5, 1.0, 4.0]])
    merged = merge(scores, weight)
    for row in range(2):
        for stream in range(3):
            alone = merge(scores[[row, row + 2], stream], weight[row, stream : stream + 1])
            torch.testing.assert_close(merged[row, stream], alone[0])

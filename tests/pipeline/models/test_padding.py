"""Copies to padded rows and back, against indexed reads and their gradients."""

import torch

from pipeline.models.attention import pad, unpad

SOURCE = torch.tensor([2, 3, 4, 0, 1, 1])
"""Sequences of 2 and 3 rows, the longer first; the last place is padding."""

PLACE = torch.tensor([3, 4, 0, 1, 2])


def test_rows_go_where_they_belong_and_come_back() -> None:
    rows = torch.arange(10.0).view(5, 2)

    padded = pad(rows, SOURCE, PLACE)

    assert padded[:, 0].tolist() == [4.0, 6.0, 8.0, 0.0, 2.0, 2.0]
    assert unpad(padded, PLACE).equal(rows)


def test_gradients_are_those_of_indexed_reads() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(5, 2, 3), torch.randn(5, 2, 3)

    def gradient(*, indexed: bool) -> torch.Tensor:
        leaf = rows.clone().requires_grad_()
        padded = leaf[SOURCE] if indexed else pad(leaf, SOURCE, PLACE)
        padded = padded * padded.detach().cos()
        back = padded[PLACE] if indexed else unpad(padded, PLACE)
        (back * weight).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert gradient(indexed=False).equal(gradient(indexed=True))

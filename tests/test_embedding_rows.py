"""Rows added to a span of a table that may begin and end within a row."""

import itertools

import pytest
import torch

from lockstep.replica.embedding_rows import add_to_span


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_in_spans(width, size):
    generator = torch.Generator().manual_seed(width * size)
    for _ in range(50):
        table = torch.randn(24, width, generator=generator)
        rows = torch.nonzero(torch.rand(24, generator=generator) < 0.4).flatten()
        values = torch.randn(len(rows), width, generator=generator)
        expected = table.clone().index_add_(0, rows, values).view(-1)
        inner = torch.randint(width * 24 // size - width + 1, (1,), generator=generator).item() % max(1, width)
        cuts = [0, *(24 * width * rank // size + inner for rank in range(1, size)), 24 * width]
        for begin, end in itertools.pairwise(cuts):
            span = table.view(-1)[begin:end].clone()
            add_to_span(span, begin, rows, values)
            assert torch.equal(span, expected[begin:end])


def test_an_empty_span_and_no_rows():
    add_to_span(torch.zeros(0), 8, torch.tensor([1, 2]), torch.ones(2, 4))
    span = torch.ones(8)
    add_to_span(span, 4, torch.zeros(0, dtype=torch.int64), torch.ones(0, 4))
    assert torch.equal(span, torch.ones(8))

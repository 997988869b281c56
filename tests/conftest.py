"""What several tests need."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """torch computes with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

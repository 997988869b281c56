"""Checkpoints of tensors on a GPU: copied in the order of the stream, written in steps, read back into place."""

import pytest
import torch
from test_keep_checkpoint import Alone

from lockstep.keep import HostMemory, Piece, open_checkpoint, tensor_file, write, write_async

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "STAGING_BYTES", 1 << 16)
    param = torch.randn(1_000_003, device="cuda")
    write(tmp_path, step=1, pieces=[Piece.whole("p", param)], tree=None, world=Alone())
    out = torch.zeros_like(param)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("p", 0, param.numel(), out=out) is out
    assert torch.equal(out, param)


def test_async_saves_what_was_there_and_reuses_pinned_memory(tmp_path):
    memory, param = HostMemory(), torch.zeros(50_000_000, device="cuda")
    addresses = set()
    for step in range(3):
        param.fill_(step)
        write_async(tmp_path, step=step, pieces=[Piece.whole("p", param)], tree=None, world=Alone(), memory=memory)
        param.fill_(-1)
        buffer = memory._buffers["p", 0]
        assert buffer.is_pinned()
        addresses.add(buffer.data_ptr())
    memory.claim()
    assert len(addresses) == 1
    for step in range(3):
        assert open_checkpoint(tmp_path / f"step-{step:09d}").read_whole("p").unique().tolist() == [step]

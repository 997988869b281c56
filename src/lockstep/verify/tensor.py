"""A torch tensor as a sketch."""

import torch
from torch import Tensor

from lockstep.verify.sketch import Sketch, positions, sketch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_KNOWS = {torch.float16, torch.float32, torch.float64}


def sketch_of(tensor: Tensor, offset: int = 0, numel: int = -1) -> Sketch:
    """The sketch of `tensor`, or of a fragment that begins at element `offset` of a tensor of `numel` elements."""
    flat = flat_on_host(tensor)
    bits = flat.view(_INTEGERS[flat.element_size()]).numpy()
    is_odd = flat.is_floating_point() and flat.dtype not in _NUMPY_KNOWS
    values = (flat.to(torch.float32) if is_odd else flat).numpy()
    return sketch(values, bits, offset=offset, numel=numel)


def sample_of(tensor: Tensor) -> Sketch:
    """The sample alone, without fingerprint and norm: takes no time however large the tensor is."""
    if tensor.layout != torch.strided or tensor.is_complex():
        return sketch_of(tensor)
    flat = tensor.detach().reshape(-1)
    places = torch.from_numpy(positions(flat.numel())).to(flat.device)
    sample = flat[places].to(torch.float64).cpu().numpy()
    return Sketch(flat.numel(), flat.numel(), 0, 0.0, 0, sample)


def flat_on_host(tensor: Tensor) -> Tensor:
    """All elements in one row in host memory; complex ones as pairs."""
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    return dense.reshape(-1).cpu().resolve_neg().contiguous()


def num_elements(tensor: Tensor) -> int:
    """How many numbers `sketch_of` sees in it."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)

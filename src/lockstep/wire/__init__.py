"""How a bucket of gradients is encoded while it travels.

protocol        what a wire is, and how to write one
sums, chunks    the two ways to combine: what is encoded is added, or its owners decode, add and encode again
full, half      gradients as they are, or in 16 bits
int8, sign      8 bits or 1 bit a value, and a scale a block (blocks: their layout, kernels: on CUDA)
top_k           the largest values
low_rank        products of two thin matrices
error_feedback  what was lost is added to the next gradient
exchange        carry one bucket between workers
after           nothing of this in the first steps
auto            which of them pays, from measured costs
"""

from lockstep.wire.after import After
from lockstep.wire.auto import Auto
from lockstep.wire.chunks import ChunkWire
from lockstep.wire.exchange import Exchange
from lockstep.wire.full import Full
from lockstep.wire.half import Half
from lockstep.wire.int8 import Int8
from lockstep.wire.low_rank import LowRank
from lockstep.wire.protocol import BucketShape, Parcel, Passage, Piece, Route, Wire
from lockstep.wire.sign import Sign
from lockstep.wire.sums import SumWire
from lockstep.wire.top_k import TopK

__all__ = [
    "After",
    "Auto",
    "BucketShape",
    "ChunkWire",
    "Exchange",
    "Full",
    "Half",
    "Int8",
    "LowRank",
    "Parcel",
    "Passage",
    "Piece",
    "Route",
    "Sign",
    "SumWire",
    "TopK",
    "Wire",
]

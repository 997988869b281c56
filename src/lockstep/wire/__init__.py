"""How a bucket of gradients is encoded while it travels.

protocol        what a wire is, and how to write one
exchange        carry one bucket between workers; what is encoded is added, or its owners decode, add and encode again
plain           gradients as they are, in 16 bits, or so at first (Full, Half, After)
blockwise       8 bits or 1 bit a value, and a scale a block (Int8, Sign); triton_kernels: the same on CUDA
top_k           the largest values
low_rank        products of two thin matrices
error_feedback  what was lost is added to the next gradient
reduction       carry all buckets of a model, each by its wire
auto            which of them pays, found out while it trains
"""

from lockstep.wire.auto import Auto
from lockstep.wire.blockwise import Int8, Sign
from lockstep.wire.exchange import ChunkWire, Exchange, SumWire
from lockstep.wire.low_rank import LowRank
from lockstep.wire.plain import After, Full, Half
from lockstep.wire.protocol import BucketShape, Parcel, Passage, Piece, Route, Wire
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

"""Checkpoints: what a run needs to go on, as files that outlive it.

In the order a save passes through:

    piece        a run of elements of one tensor: what a worker owns and writes
    tree         everything that is not a tensor, as JSON
    host_memory  copies of the pieces, so that training can go on while they are written
    safetensors  the file format of the tensors
    plan         what the workers agree on before anything is written
    part         one worker's file
    exchange     how the workers hear of each other's parts: by collectives, or by letters in the folder
    manifest     the table of contents, and whether the pieces cover the tensors
    shelf        the folder of checkpoints: names, renames, leftovers
    save         the protocol that ties them: `write` and `write_async`
    checkpoint   reading, on any number of workers
    single_file  one ordinary safetensors file for other tools

Nothing here knows about models or optimizers: the caller names tensors and says who owns which part.
"""

from lockstep.keep.checkpoint import Checkpoint, open_checkpoint
from lockstep.keep.host_memory import HostMemory
from lockstep.keep.piece import Piece
from lockstep.keep.save import Saving, write, write_async
from lockstep.keep.single_file import export

__all__ = ["Checkpoint", "HostMemory", "Piece", "Saving", "export", "open_checkpoint", "write", "write_async"]

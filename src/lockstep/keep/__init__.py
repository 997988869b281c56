"""Checkpoints: what a run needs to go on, as files that outlive it.

In the order a save passes through:

    save_load    `lockstep.save` and `load`, and a run's state as one dict in memory
    state        a model and its optimizer as named pieces, and back, whatever is split
    checks       whether a checkpoint fits a model, asked before anything is changed
    pieces       a run of elements of one tensor: what a worker owns and writes; copies of them beside training
    json_tree    everything that is not a tensor, as JSON
    writing      the protocol that ties the rest: `write` and `write_async`
    tensor_file  the safetensors file of one worker
    coordination how the workers hear of each other's files beside training: by letters in the folder
    manifest     the table of contents, and whether the pieces cover the tensors
    folder       the folder of checkpoints: names, renames, leftovers
    checkpoint   reading, on any number of workers; one ordinary file for other tools

But for the first three, nothing here knows of models or optimizers: the caller names tensors and says who owns what.
"""

from lockstep.keep.checkpoint import Checkpoint, export, open_checkpoint
from lockstep.keep.pieces import HostMemory, Piece
from lockstep.keep.writing import Saving, write, write_async

__all__ = ["Checkpoint", "HostMemory", "Piece", "Saving", "export", "open_checkpoint", "write", "write_async"]

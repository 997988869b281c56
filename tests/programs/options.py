"""What a program was asked for on its command line: `python gan.py zero=1 mistake=bypassed`."""

import sys

import torch

import lockstep


def options():
    """The words of the command line as keywords."""
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    return {name: int(value) if value.isdigit() else value for name, value in given.items()}


def rows_of(world, *tensors):
    """This worker's part of a global batch."""
    return [part.tensor_split(world.size)[world.rank] for part in tensors]


def double(seed):
    """A generator, and double precision: so that sums which are rounded in another order show no difference."""
    torch.set_default_dtype(torch.double)
    return torch.Generator().manual_seed(seed)


def program(main):
    """Run a program's `main` with the words of its command line, in a world of its own."""
    with lockstep.join(seed=0):
        main(**options())

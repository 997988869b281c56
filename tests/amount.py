"""How much is tried: a selection, so that all tests take minutes; everything with FULL=1 in the environment."""

import os


def some(selection, everything):
    """`selection`, or `everything` if that was asked for."""
    return list(everything if "FULL" in os.environ else selection)

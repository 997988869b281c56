"""torchvision, also where its wheel was built for another torch than the one that is here."""

import importlib

import pytest
import torch

OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Those that it asks for when it is imported; models for classification, and timm's, call none of them."""


def mend_torchvision():
    """Let it be imported, by whoever wants to, if it is there at all: transformers does where it finds it."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError as error:  # "operator torchvision::nms does not exist": PyPI has wheels for CUDA only.
        if "torchvision::" not in str(error):
            raise
        for name, schema in OPERATORS.items():
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", schema)


def import_torchvision():
    """The package; the test is skipped where there is none."""
    mend_torchvision()
    return pytest.importorskip("torchvision")

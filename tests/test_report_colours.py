"""The page's colours: kinds of time can be told apart with any colour vision, and text can be read."""

import itertools

import numpy as np
import pytest

from lockstep.watching.page_style import DARK, LIGHT
from lockstep.watching.run_record import KINDS

VISIONS = {
    "full": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What is left of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1)."""

TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
LEAST_DISTANCE = 13
"""In CIELAB; about 2 can be seen side by side."""


def linear(colour):
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(colour, vision):
    xyz = TO_XYZ @ np.clip(np.array(vision) @ linear(colour), 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one, other):
    low, high = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_kinds_can_be_told_apart(colours, vision):
    for one, other in itertools.combinations(KINDS, 2):
        distance = np.linalg.norm(lab(colours[one], VISIONS[vision]) - lab(colours[other], VISIONS[vision]))
        assert distance >= LEAST_DISTANCE, (one, other, distance)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read(colours):
    for text, ground in itertools.product(("ink", "soft"), ("card", "ground")):
        assert contrast(colours[text], colours[ground]) >= 4.5
    for kind in (*KINDS, "hidden"):
        assert contrast(colours[kind], "#ffffff" if kind == "backward" else "#111111") >= 4.5, kind

"""The colours are legible on light and dark pages, and stay apart for colour-blind readers."""

import itertools

import numpy as np
import pytest

from kda_edu.teach import COLOURS, colour
from kda_edu.teach.palette import ALIASES, DARK_PAGE, LIGHT_PAGE, contrast, luminance

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision
# deficiency", 2009: full severity, for linear RGB.
VISION = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.0890])


def linear(text):
    channels = np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    x = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_contrast_is_that_of_wcag():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)
    assert luminance("#ff0000") == pytest.approx(0.2126)


@pytest.mark.parametrize("symbol", COLOURS)
@pytest.mark.parametrize("page", [LIGHT_PAGE, DARK_PAGE])
def test_every_colour_is_legible_on_both_pages(symbol, page):
    assert contrast(COLOURS[symbol], page) >= 3


def test_text_is_legible_on_both_pages():
    """Titles and axes are in ink: as near to 4.5 on both pages as one colour can be."""
    assert contrast(COLOURS["ink"], LIGHT_PAGE) > 4
    assert contrast(COLOURS["ink"], DARK_PAGE) > 4


@pytest.mark.parametrize("vision", VISION)
def test_any_two_colours_are_told_apart(vision):
    seen = {
        symbol: lab(np.array(VISION[vision]) @ linear(text)) for symbol, text in COLOURS.items()
    }
    for a, b in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[a] - seen[b]) >= 15, (a, b)


def test_symbols_have_names_in_words():
    assert colour("S") == colour("state") == colour("memory") == COLOURS["S"]
    assert set(ALIASES.values()) <= set(COLOURS)
    assert {"q", "k", "v", "g", "beta", "S", "o", "error", "ink"} == set(COLOURS)
    with pytest.raises(ValueError, match="symbol: expected one of q, k, .*, got 'x'"):
        colour("x")

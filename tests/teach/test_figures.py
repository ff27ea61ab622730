"""Pictures: legible, small, the same bytes each time, with alternative text."""

import base64
import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from kda_edu.teach import (
    COLOURS,
    Picture,
    animate_states,
    colour,
    error_map,
    figure,
    filmstrip,
    heatmaps,
    show,
    state_heatmap,
)
from kda_edu.teach.images import MOST_BYTES

STATES = torch.randn(30, 8, 12, generator=torch.Generator().manual_seed(0)).cumsum(0)


def rgb(text):
    return [int(text[i : i + 2], 16) for i in (1, 3, 5)]


def pixels(picture):
    return np.array(Image.open(io.BytesIO(picture.data)).convert("RGBA"))


def holds(picture, text):
    """Is there a fully opaque pixel of that colour?"""
    return (pixels(picture) == [*rgb(text), 255]).all(-1).any()


def frames_of(data):
    image = Image.open(io.BytesIO(data))
    made = []
    for number in range(getattr(image, "n_frames", 1)):
        image.seek(number)
        made.append((np.array(image.convert("RGBA")), image.info.get("duration")))
    return made


def draw_all():
    fig, ax = figure()
    ax.plot([0, 1], [1, 0], color=colour("k"), label="k")
    ax.legend()
    return {
        "own": show(fig, alt="One falling line from one to zero."),
        "state": state_heatmap(STATES[3]),
        "several": heatmaps(
            {"S": STATES[3], "k": STATES[4]}, labels=("key channel", "value channel")
        ),
        "errors": error_map(STATES[3] + 1e-6 * STATES[5], STATES[3]),
        "strip": filmstrip(STATES),
        "film": animate_states(STATES[:5]),
    }


@pytest.fixture(scope="module")
def drawn():
    return draw_all()


def test_every_picture_has_alternative_text_and_is_small(drawn):
    for picture in drawn.values():
        assert len(picture.alt.split()) >= 5
        assert len(picture.data) < MOST_BYTES == 200_000
    assert drawn["state"].alt == (
        "Heatmap with a shared colour scale around zero: state S (8 by 12)."
    )
    assert drawn["strip"].alt == "The 8 by 12 state matrix after tokens 0, 6, 12, 17, 23, 29."


def test_the_same_picture_has_the_same_bytes(drawn):
    again = draw_all()
    assert {name: p.data for name, p in again.items()} == {
        name: p.data for name, p in drawn.items()
    }
    assert all(word not in drawn["own"].data for word in (b"Software", b"tEXt", b"tIME"))


def test_pages_shine_through(drawn):
    for name, picture in drawn.items():
        alpha = pixels(picture)[..., 3]
        assert alpha[0, 0] == alpha[-1, -1] == 0, name
        assert (alpha == 255).any(), name


def test_frames_and_lines_have_the_colour_of_their_symbol(drawn):
    assert holds(drawn["state"], COLOURS["S"]) and not holds(drawn["state"], COLOURS["k"])
    assert holds(drawn["several"], COLOURS["S"]) and holds(drawn["several"], COLOURS["k"])
    assert holds(drawn["errors"], COLOURS["error"])
    assert holds(drawn["own"], COLOURS["k"])
    assert holds(drawn["own"], COLOURS["ink"])


def test_the_legend_is_drawn_without_a_box(drawn):
    """Its light frame and face would be the only light pixels of this picture."""
    seen = pixels(drawn["own"])
    assert not ((seen[..., :3] > 180).all(-1) & (seen[..., 3] > 100)).any()


def test_heatmaps_share_one_scale_around_zero():
    picture = heatmaps({"small": torch.full((4, 4), 0.01), "large": torch.full((4, 4), 1.0)})
    image = pixels(picture)
    middle = image.shape[0] // 2
    left, right = image[middle, image.shape[1] // 5, :3], image[middle, image.shape[1] * 3 // 5, :3]
    assert left.min() > 230  # nearly white: 0.01 of a scale of 1
    assert right[0] > 2 * right[2]  # dark red


def test_values_that_are_not_finite_do_not_break_the_scale():
    matrix = torch.tensor([[1.0, -float("inf")], [float("nan"), 0.5]])
    assert heatmaps({"g": matrix}).data == heatmaps({"g": matrix}, scale=1.0).data
    zero = torch.zeros(3, 3)
    assert state_heatmap(zero).data == state_heatmap(zero, scale=1.0).data


def test_the_film_shows_each_state_in_turn(tmp_path):
    picture = animate_states(STATES[:6], path=tmp_path / "film.gif", seconds=0.4)
    frames = frames_of(picture.data)
    assert [duration for _, duration in frames] == [400] * 5 + [1500]
    for (a, _), (b, _) in zip(frames, frames[1:], strict=False):
        assert (a != b).any()
    first = frames_of(animate_states(STATES[:1], scale=float(STATES[:6].abs().max())).data)[0][0]
    assert (frames[0][0] == first).all()
    assert len(frames_of((tmp_path / "film.gif").read_bytes())) == 6


def test_a_long_film_is_thinned_and_keeps_first_and_last():
    assert len(frames_of(animate_states(torch.randn(100, 3, 4)).data)) == 24
    large = animate_states(torch.randn(24, 64, 64))
    assert 4 <= len(frames_of(large.data)) < 24 and len(large.data) <= MOST_BYTES
    with pytest.raises(ValueError, match="path: expected a name ending in .png or .gif"):
        animate_states(STATES[:2], path="film.mp4")


def test_the_output_of_a_cell_carries_alternative_text_and_width(drawn):
    picture = Picture(drawn["own"].data, "One falling\n  line here.", caption="It falls.")
    data, metadata = picture._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]) == picture.data
    assert data["text/plain"] == "[picture: One falling line here.]\nIt falls."
    assert set(data) == {"image/png", "text/plain"}, "anything else is compared by nbval"
    assert metadata["image/png"] == {
        "alt": "One falling line here.",
        "width": 4.5 * 96,
        "caption": "It falls.",
    }


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: show(figure()[0], alt=""),
            "alt: expected a sentence that says what is shown, got ''",
        ),
        (lambda: show(figure()[0], alt="figure"), "alt: expected a sentence"),
        (lambda: Picture(b"GIF89a", "a b c d"), "data: expected a PNG"),
        (lambda: Picture(b"\x89PNG\r\n\x1a\n" + bytes(200_000), "a b c d"), "at most 200000 bytes"),
        (lambda: state_heatmap(torch.ones(3)), r"state S: expected a matrix, got shape \(3,\)"),
        (lambda: filmstrip(torch.ones(3, 3)), r"states: expected shape \[T, K, V\]"),
        (lambda: error_map(torch.ones(2, 2), torch.ones(2, 3)), r"got has shape \(2, 2\)"),
    ],
)
def test_bad_pictures_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_kit_is_imported_without_matplotlib_and_ipython():
    code = (
        "import sys, kda_edu.teach as t; t.exercise(t.exercises.exercise_names()[0]); "
        "loaded = {'matplotlib', 'IPython', 'PIL', 'sphinx'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

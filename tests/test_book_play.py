"""The page to play with: its script computes what Python does, and its controls answer to keys.

Run by `make test-book`. The mathematics is tested on an empty page, the controls in the book.
"""

import math
import re

import pytest
import torch
from browser import HTML, PHONE, Visit, open_browser  # noqa: F401  (a fixture)

from kda_edu import reference, teach

SCRIPT = HTML.parent.parent / "_static" / "play.js"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def play(browser):
    """call(name, arguments ...) runs a function of play.js and returns its result."""
    page = browser.new_page()
    page.add_script_tag(path=SCRIPT)
    yield lambda name, *arguments: page.evaluate(
        "([name, given]) => kdaPlay[name](...given)", [name, arguments]
    )
    page.close()


def oracle(made, tokens, g, beta):
    """The state [K, V] by the reference in float64."""
    k = torch.tensor(made["keys"], dtype=torch.float64)[None, :tokens, None]  # [1, T, 1, K]
    v = torch.tensor(made["values"], dtype=torch.float64)[None, :tokens, None]  # [1, T, 1, V]
    decay, strength = torch.full_like(k, g), torch.full_like(k[..., 0], beta)
    return reference.recurrent_kda(k, k, v, decay, strength, output_final_state=True)[1][0, 0]


@pytest.mark.parametrize("tokens, g, beta", [(12, 0.0, 1.0), (7, -0.35, 0.8), (5, -4.0, 2.0)])
def test_the_state_is_that_of_the_oracle(play, tokens, g, beta):
    made = play("inputs")
    want = oracle(made, tokens, g, beta)
    got = play("stateAfter", tokens, g, beta)
    assert teach.rms_error(torch.tensor(got, dtype=torch.float64), want) < 1e-13
    for token in (0, tokens - 1):
        key, value = (torch.tensor(made[name][token]).double() for name in ("keys", "values"))
        error = ((want.T @ key - value).norm() / value.norm()).item()
        assert play("recallError", got, token) == pytest.approx(error, rel=1e-5, abs=1e-6)


def test_the_inputs_are_those_that_the_page_names(play):
    made = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in play("inputs").items()}
    assert made["keys"].shape == (12, 8) and made["values"].shape == (12, 6)
    assert torch.allclose(made["keys"].norm(dim=1), torch.ones(12, dtype=torch.float64))
    assert made["values"].abs().max() <= 1 and made["values"].std() > 0.4


@pytest.mark.parametrize("C", [16, 64, 128])
@pytest.mark.parametrize("g", [-0.05, -1.4, -5.0, -5.95, -8.0])
def test_the_factors_overflow_where_torch_says(play, g, C):
    G = torch.full((C,), g, dtype=torch.float64).cumsum(0)
    first = G.view(-1, 16)[:, :1].expand(-1, 16).flatten()  # the first row of each 16
    want = {"plain": -G, "own": G, "anchored": first - G}
    logs = play("factors", g, C)
    for name, exponent in want.items():
        got = torch.tensor(logs[name], dtype=torch.float64)
        assert torch.allclose(got, exponent / math.log(2), rtol=1e-12, atol=1e-12)
        for format, dtype in DTYPES.items():
            factor = exponent.exp().to(dtype)
            beyond = factor.isinf().tolist()
            assert play("firstOverflow", logs[name], format) == first_true(beyond)
            small = (exponent.exp() < torch.finfo(dtype).tiny).tolist()
            assert play("firstVanishing", logs[name], format) == first_true(small)


def first_true(flags):
    return flags.index(True) if True in flags else -1


@pytest.mark.parametrize("D, C", [(128, 64), (64, 16), (256, 32)])
def test_the_bytes_are_those_of_the_chapters(play, D, C):
    table, traffic, sizes = teach.from_chapter("ch10", "READS_WRITES", "traffic", "sizes_in_bytes")
    size = sizes(D, D, C) | dict(h=2 * D * D // C, v_new=2 * D, o=2 * D, last_G=4 * D // C)
    steps = table | {
        "state": ("w u kg last_G", "h v_new"),
        "output": ("q v_new G A_qk h", "o"),
    }
    got = play("traffic", D, C)
    assert got["chunks"] == sum(map(sum, traffic(steps, size).values()))
    assert got["least"] == sum(size[name] for name in "q k v g beta o".split())
    assert got["recurrent"] * 8192 == teach.from_chapter("ch04", "bytes_moved")(8192, D, D)
    assert got["loop"] == 6 * 4 * D * D


def test_the_keyboard_moves_it_and_words_say_what_it_shows(browser):
    with Visit(browser, "book/play.html", "dark") as visit:
        page = visit.page
        page.set_viewport_size(PHONE)
        words = {
            name: page.locator(f"#play-{name}-words") for name in ("state", "factors", "bytes")
        }
        before = {name: place.inner_text() for name, place in words.items()}
        assert "After token 5 of 12" in before["state"]
        assert "infinity from row 59 on" in before["factors"]
        assert "2^32 and fits" in before["factors"]
        page.locator("#play-token").focus()
        page.keyboard.press("ArrowLeft")
        assert "After token 4 of 12" in words["state"].inner_text()
        assert page.locator("#play-token").get_attribute("aria-valuetext") == "4 of 12"
        page.locator("#play-gate").focus()
        page.keyboard.press("Home")
        assert "reaches 2^0 and fits" in words["factors"].inner_text()
        page.locator("#play-chunk").focus()
        page.keyboard.press("Home")
        assert "chunks of 16" in words["bytes"].inner_text()
        assert words["bytes"].inner_text() != before["bytes"]
        assert page.locator("#play-state rect").count() == 8 * 6
        shown = page.locator("#play-bytes-chunks .play-number").inner_text()
        assert re.sub(r"\D", "", shown) in words["bytes"].inner_text()
        unlabelled = (
            page.locator("#play-controls")
            .locator("input, select")
            .evaluate_all("all => all.filter(e => !e.labels.length).map(e => e.id)")
        )
        assert unlabelled == []
        assert not visit.problems, visit.problems

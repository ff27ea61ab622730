"""The error metric, the line that `check` prints, and what a failure says."""

import math

import pytest
import torch

from kda_edu.teach import BUDGETS, CheckFailed, budget_for, check, max_error, rms_error
from kda_edu.teach.check import show_bound

NAN, INF = math.nan, math.inf


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def failure(got, want, **options):
    with pytest.raises(CheckFailed) as caught:
        check(got, want, **options)
    return str(caught.value)


# -- the metric --------------------------------------------------------------------------------


def test_error_is_a_ratio_of_root_mean_squares():
    want = torch.tensor([3.0, -4.0])
    got = torch.tensor([3.0, -4.5])
    assert rms_error(got, want) == pytest.approx(0.5 / 5.0, rel=1e-15)
    assert max_error(got, want) == 0.5
    assert rms_error(10 * got, 10 * want) == pytest.approx(0.1, rel=1e-15)


def test_error_is_relative_to_want_not_to_got():
    assert rms_error(torch.tensor([2.0]), torch.tensor([1.0])) == 1.0
    assert rms_error(torch.tensor([1.0]), torch.tensor([2.0])) == 0.5


def test_error_against_zero_is_absolute():
    assert rms_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == pytest.approx(5 / 2**0.5)
    assert rms_error(torch.zeros(3), torch.zeros(3)) == 0.0


def test_error_of_empty_tensors_is_zero():
    assert rms_error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0
    assert max_error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_squares_neither_overflow_nor_vanish(size):
    want = torch.tensor([1.0, -2.0], dtype=torch.float64) * size
    assert rms_error(want * 1.5, want) == pytest.approx(0.5, rel=1e-12)


def test_float16_is_compared_in_float64():
    want = torch.tensor([300.0, 400.0])
    assert rms_error(want.half() * 1.0, want) == 0.0  # 300^2 is beyond float16
    assert rms_error(torch.tensor([300.0, 404.0]).half(), want) == pytest.approx(4 / 500, rel=1e-9)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_not_a_number_in_got_never_passes(bad):
    want, got = torch.ones(1000), torch.ones(1000)
    got[7] = bad
    assert rms_error(got, want) == INF
    assert max_error(got, want) == INF
    failure(got, want, budget=1e30)


@pytest.mark.parametrize(
    "got, want, error",
    [
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([-INF, 2.0], [-INF, 1.0], 1.0),
        ([INF, 1.0], [-INF, 1.0], INF),
        ([5.0, 1.0], [INF, 1.0], INF),
        ([NAN, 1.0], [NAN, 1.0], INF),
        ([5.0, 1.0], [NAN, 1.0], INF),
        ([NAN, 1.0], [INF, 1.0], INF),
    ],
)
def test_infinities_agree_or_fail_and_nan_fails(got, want, error):
    assert rms_error(torch.tensor(got), torch.tensor(want)) == error


def test_budgets_are_those_of_the_book():
    table = {
        (torch.float64, "forward"): 1e-12,
        (torch.float32, "forward"): 1e-5,
        (torch.bfloat16, "forward"): 6e-3,
        (torch.bfloat16, "gradient"): 2e-2,
        (torch.float16, "forward"): 2e-3,
        (torch.float16, "gradient"): 1e-2,
    }
    assert {key: budget_for(*key) for key in table} == table
    assert set(BUDGETS) == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    with pytest.raises(ValueError, match="kind: expected 'forward' or 'gradient', got 'back'"):
        budget_for(torch.float32, "back")
    with pytest.raises(ValueError, match="dtype: expected one of .*got 'int3'"):
        budget_for("int3")


# -- what passes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, kind, passes, fails",
    [
        (torch.float64, "forward", 0.9e-12, 1.1e-12),
        (torch.float32, "forward", 0.9e-5, 1.1e-5),
        (torch.bfloat16, "forward", 4e-3, 8e-3),
        (torch.bfloat16, "gradient", 1.5e-2, 2.5e-2),
        (torch.float16, "forward", 1.5e-3, 2.5e-3),
        (torch.float16, "gradient", 9e-3, 1.1e-2),
    ],
)
def test_the_budget_is_that_of_the_dtype_of_got(dtype, kind, passes, fails, capsys):
    got = torch.ones(4, 4, dtype=dtype)
    check(got, torch.full((4, 4), 1 / (1 + passes), dtype=torch.float64), kind=kind)
    failure(got, torch.full((4, 4), 1 / (1 + fails), dtype=torch.float64), kind=kind)


def test_the_line_says_error_budget_and_place(capsys):
    want = random(2, 70, 3, 5)
    got = want.clone()
    got[1, 5, 0, 3] += 1e-12
    check(got, want, "o")
    line = "ok  o  error < 3e-14 (budget 1e-12), worst at batch 1, token 5, head 0, channel 3\n"
    assert capsys.readouterr().out == line


def test_axes_of_length_one_are_not_named(capsys):
    want = random(1, 7, 1, 5)
    got = want.clone()
    got[0, 0, 0, 0] += 1e-12
    check(got, want, "o")
    assert capsys.readouterr().out.endswith("worst at token 0, channel 0\n")
    check(got[:, :1, :, :1], want[:, :1, :, :1], "o", budget=1e-10)
    assert capsys.readouterr().out.endswith("worst at the only element\n")


def test_round_off_is_reported_by_its_order_only(capsys):
    want = random(70, 5)
    for got in (want * (1 + 2e-16), want * (1 + 4e-16), want):
        check(got, want, "o", dims="TV")
        assert capsys.readouterr().out == "ok  o  error < 1e-14 (budget 1e-12)\n"


@pytest.mark.parametrize(
    "error, dtype, budget, text",
    [
        (0.0, torch.float64, 1e-12, "error < 1e-14"),
        (2.1e-14, torch.float64, 1e-12, "error < 3e-14"),
        (3.1e-14, torch.float64, 1e-12, "error < 1e-13"),
        (9.9e-13, torch.float64, 1e-12, "error <= 1e-12"),
        (2.2e-3, torch.bfloat16, 6e-3, "error < 0.003"),
        (5e-3, torch.bfloat16, 6e-3, "error <= 0.006"),
        (0.0, torch.float32, 1e-30, "error < 1e-16"),
        (0.0, torch.int64, 0.0, "error = 0"),
    ],
)
def test_the_printed_bound_is_a_rung_above_the_error(error, dtype, budget, text):
    if text == "error < 1e-16":
        text = "error <= 1e-30"  # never above the budget
    assert show_bound(error, dtype, budget) == text


def test_integers_must_be_equal(capsys):
    check(torch.arange(5), torch.arange(5), "ids")
    assert "error = 0 (budget 0)" in capsys.readouterr().out
    failure(torch.arange(5), torch.arange(1, 6))


# -- what cannot be compared -------------------------------------------------------------------


def test_shapes_are_both_named():
    with pytest.raises(ValueError, match=r"o: got has shape \(3, 4\), want has shape \(3, 5\)$"):
        check(torch.ones(3, 4), torch.ones(3, 5), "o")
    with pytest.raises(ValueError, match=r"\(4, 3\).*\(3, 4\); the last two axes are swapped"):
        check(torch.ones(4, 3), torch.ones(3, 4), "S")
    with pytest.raises(ValueError, match="differ only in axes of length 1"):
        check(torch.ones(1, 3, 4), torch.ones(3, 4), "S")
    with pytest.raises(ValueError, match=r"got has shape \(1,\), want has shape \(2,\)"):
        rms_error(torch.ones(1), torch.ones(2))


def test_a_less_precise_oracle_is_refused():
    with pytest.raises(TypeError, match="o: got is torch.float64, want is torch.float32"):
        check(torch.ones(3).double(), torch.ones(3), "o")
    with pytest.raises(TypeError, match="got is torch.float16, want is torch.bfloat16"):
        check(torch.ones(3).half(), torch.ones(3).bfloat16())
    with pytest.raises(TypeError, match="got is torch.float32, want is torch.int64"):
        check(torch.ones(3), torch.ones(3).long())


def test_devices_are_both_named():
    with pytest.raises(ValueError, match="o: got is on meta, want is on cpu"):
        check(torch.ones(3, device="meta"), torch.ones(3), "o")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(budget=-1.0), "budget: expected a finite number >= 0, got -1.0"),
        (dict(budget=NAN), "budget: expected a finite number"),
        (dict(budget=INF), "budget: expected a finite number"),
        (dict(dims="T"), r"dims: expected 2 letters for shape \(3, 4\), got 'T'"),
        (dict(kind="x"), "kind: expected 'forward'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        check(torch.ones(3, 4), torch.ones(3, 4), **options)


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="want: expected a torch.Tensor for o, got list"):
        check(torch.ones(2), [1.0, 1.0], "o")


# -- what a failure says -----------------------------------------------------------------------


def test_the_map_shows_which_tokens_and_channels_are_wrong():
    want = random(2, 6, 2, 4)
    got = want.clone()
    got[1, 2, 0, 1:3] += 1.0
    got[0, 4, 1, 3] = NAN
    got[0, 5, 1, 0] = INF
    message = failure(got, want, name="o").splitlines()
    assert message[0] == "o is wrong: error inf, budget 1e-12, shape (2, 6, 2, 4)"
    assert message[1] == "4 of 96 elements are wrong, 2 of them NaN or infinite"
    assert message[2] == "first wrong token: 2 of 6"
    rows = [line.split()[1] for line in message[-6:]]
    assert rows == ["....", "....", ".xx.", "....", "...!", "!..."]
    assert message[-7].startswith("rows are tokens, columns are channels:")


def test_the_map_of_a_state_has_key_and_value_channels():
    want = random(2, 3, 4, 5)
    got = want.clone()
    got[1, 2, 3, 4] += 1
    message = failure(got, want, name="final_state")
    assert "rows are key channels, columns are value channels" in message
    assert "worst at sequence 1, head 2, key channel 3, value channel 4" in message


def test_a_long_map_is_merged_and_keeps_every_mark():
    want = random(1000, 200)
    got = want.clone()
    got[777, 130] += 5
    message = failure(got, want, name="o", dims="TV")
    assert "(32 x 4 to a mark)" in message
    rows = [line.split() for line in message.splitlines() if line.startswith("  ")]
    assert all(len(marks) == 50 for _, marks in rows) and len(rows) == 32
    assert [start for start, marks in rows if "x" in marks] == ["768"]
    assert rows[24][1].index("x") == 130 // 4


def hint(change, want=None, **options):
    want = random(2, 70, 3, 5) + 0.5 if want is None else want
    message = failure(change(want.clone()), want, **options)
    hints = [line for line in message.splitlines() if line.startswith("likely cause: ")]
    return hints[0].removeprefix("likely cause: ") if hints else None


def set_tokens(value, tokens):
    def change(x):
        x[:, tokens] = value
        return x

    return change


def test_hint_names_a_factor():
    want = random(2, 70, 3, 8)
    assert hint(lambda x: 2 * x, want) == "everything is off by the factor 2 (2)"
    assert hint(lambda x: -x, want) == "everything is off by the factor -1 (the sign)"
    assert hint(lambda x: x * 8**0.5, want).endswith("factor 2.828 (sqrt(8))")
    assert hint(lambda x: x / 128**0.5, want).endswith("factor 0.08839 (1/sqrt(128))")
    assert hint(lambda x: x / math.log(2), want).endswith("(1/ln 2: natural logarithm or log2?)")
    assert hint(lambda x: x * 0.777, want) == "everything is off by the factor 0.777"


def test_hint_names_a_transposed_state():
    change, want = (lambda x: x.transpose(-1, -2).contiguous()), random(3, 6, 6)
    assert hint(change, want, name="S") == (
        "the axes key channel and value channel are swapped (transposed)"
    )
    assert hint(lambda x: x.transpose(0, 1).contiguous(), random(7, 7, 2), dims="TTV")


def test_hint_names_one_head_one_sequence_or_one_channel():
    def head(x):
        x[:, :, 1] += 1
        return x

    def batch(x):
        x[1] += 1
        return x

    def channel(x):
        x[..., 4] += 1
        return x

    assert hint(head) == "only head 1 of 3 is wrong"
    assert hint(batch) == "only batch 1 of 2 is wrong"
    assert hint(channel) == "only channel 4 of 5 is wrong"


def test_hint_names_a_pattern_of_tokens():
    assert hint(set_tokens(0.0, slice(64, None))) == (
        "only the last, shorter chunk of 64 is wrong: look at the mask"
    )
    assert hint(set_tokens(9.0, slice(48, None))) == (
        "all is right before token 48, a multiple of 16: look at what passes from chunk to chunk"
    )
    assert hint(set_tokens(9.0, slice(11, None))) == (
        "all is right before token 11 and wrong from there on"
    )
    assert hint(set_tokens(9.0, [0])) == "only token 0 is wrong: look at the initial state"
    assert hint(set_tokens(9.0, [0, 16, 32, 48, 64])) == (
        "only the first token of each chunk of 16 is wrong: look at the state that comes in"
    )
    assert hint(set_tokens(9.0, [30, 31, 62, 63])) == (
        "only the last tokens of each chunk of 32 are wrong"
    )
    assert hint(set_tokens(9.0, [3, 17, 40])) is None


def test_hint_names_a_shift_by_one_token():
    assert hint(lambda x: x.roll(1, 1)).startswith(
        "every token holds the value of the token before"
    )
    assert hint(lambda x: x.roll(-1, 1)).startswith(
        "every token holds the value of the token after"
    )


def test_hint_names_what_was_never_written():
    assert hint(lambda x: x * NAN) == "no element is a number: was the output ever written?"
    assert hint(lambda x: x * 0) == "the result is zero everywhere: was it ever stored?"


def test_hint_for_single_bad_numbers():
    def spoil(x):
        x[0, 3, 1, 2] = x[1, 50, 2, 0] = INF
        return x

    assert hint(spoil) == "NaN or infinity: an exponent overflowed, or 0/0"


def test_an_error_spread_thin_is_still_shown():
    """No element is off by ten budgets, but the RMS is above one."""
    want = random(70, 5)
    noise = 3e-12 * random(70, 5, seed=1).sign()
    message = failure(want + noise, want, dims="TV")
    assert "x" in message.splitlines()[-1]
    assert int(message.splitlines()[1].split()[0]) == 350


def test_gradients_may_be_compared(capsys):
    want = random(4, 4).requires_grad_()
    check(want * 1.0, want)
    failure(want * 2.0, want)

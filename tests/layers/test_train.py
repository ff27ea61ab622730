"""Training from the command line: the loss falls, nothing is lost, bad input is named."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kda_edu import generate, train

ROOT = Path(__file__).resolve().parents[2]
SIZES = "--layers 1 --heads 1 --head-dim 8 --hidden-size 16 --batch 4 --length 24".split()


def command(*arguments):
    return [sys.executable, "-m", "kda_edu.train", *map(str, arguments), *SIZES]


def environment():
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return path


@pytest.fixture(autouse=True)
def handlers():
    """Whatever a run sets, the tests' own handlers come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(*arguments):
    return train.main([*map(str, arguments), "--device", "cpu"])


def test_the_loss_falls_and_the_model_talks(text, tmp_path, capsys):
    out = tmp_path / "run"
    options = ("--steps", 60, "--eval-every", 20, "--lr", 0.02, "--warmup", 5)
    assert run(text, "--out", out, *options, *SIZES) == train.FINE
    lines = log_of(out)
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert lines[0]["loss"] > 4.5 and lines[-1]["validation"] < 2.0
    assert [line["step"] for line in lines if "validation" in line] == [20, 40, 60]
    capsys.readouterr()
    generate.main([str(out / "checkpoint.pt"), "--prompt", "the q", "--bytes", "30"])
    first = capsys.readouterr().out
    assert first.startswith("the q") and len(first) > 20
    generate.main([str(out / "checkpoint.pt"), "--prompt", "the q", "--bytes", "30"])
    assert capsys.readouterr().out == first


def test_a_killed_run_goes_on_to_the_same_curve(text, tmp_path):
    options = ("--steps", 40, "--save-every", 5, "--eval-every", 10)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(text, "--out", whole, *options, *SIZES)
    process = subprocess.Popen(
        command(text, "--out", broken, *options),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (broken / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = torch.load(broken / "checkpoint.pt", weights_only=True)["step"]
    assert 5 <= saved < 40
    run(text, "--out", broken, "--resume")
    assert log_of(broken) == log_of(whole)
    states = [torch.load(p / "checkpoint.pt", weights_only=True) for p in (whole, broken)]
    for a, b in zip(*(state["model"].values() for state in states), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_first(number, text, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(text, "--out", out, "--steps", 100000, "--save-every", 100000),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (out / "log.jsonl").exists() and (out / "log.jsonl").stat().st_size > 0:
            break
        time.sleep(0.01)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == train.INTERRUPTED and "saved in" in said
    step = torch.load(out / "checkpoint.pt", weights_only=True)["step"]
    assert step == len(log_of(out)) > 0


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(text, tmp_path, monkeypatch):
    out = tmp_path / "run"
    run(text, "--out", out, "--steps", 2, *SIZES)
    before = (out / "checkpoint.pt").read_bytes()

    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError):
        run(text, "--out", out, "--resume", "--steps", 4)
    assert (out / "checkpoint.pt").read_bytes() == before


def test_text_comes_from_files_folders_or_python(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "2.txt").write_text("two")
    (tmp_path / "a" / "1.md").write_text("one")
    (tmp_path / "a" / "picture.png").write_bytes(b"\x89PNG")
    assert bytes(train.read_text([tmp_path / "a"]).tolist()) == b"one\n\ntwo"
    assert 300_000 < len(train.read_text([])) < 800_000


def test_the_data_of_a_step_follow_from_seed_and_step():
    text, s = torch.arange(200, dtype=torch.uint8), train.Settings(batch=3, length=8)
    x = train.batch_of(text, s, 7)
    assert torch.equal(x, train.batch_of(text, s, 7)) and x.shape == (3, 9)
    assert torch.equal(x[:, 1:], x[:, :-1] + 1)  # windows of neighbours
    other = train.Settings(batch=3, length=8, seed=1)
    assert not torch.equal(x, train.batch_of(text, s, 8))
    assert not torch.equal(x, train.batch_of(text, other, 7))


def test_the_learning_rate_rises_and_falls():
    s = train.Settings(steps=100, warmup=10, lr=1.0)
    rates = [train.learning_rate(s, step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[-1] < 0.102


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere.txt"], "FILES: expected a file or folder, found no nowhere.txt"),
        (["{folder}"], "FILES: expected text .* found none"),
        (["{blank}"], "FILES: expected some text, got 3 bytes of white space"),
        (["{short}"], "FILES: expected at least 1291 bytes for --length 128, got 40"),
        (["{text}", "--resume"], "--resume: expected a checkpoint, found no .*checkpoint.pt"),
        (["{text}", "--device", "cuda"], "--device: expected cpu, since there is no CUDA GPU"),
        (["{text}", "--layers", "0"], "num_layers: expected an integer >= 1, got 0"),
    ],
)
def test_bad_input(arguments, words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    places = dict(folder=tmp_path / "empty", blank=tmp_path / "b", short=tmp_path / "s", text=text)
    places["folder"].mkdir()
    places["blank"].write_text(" \n ")
    places["short"].write_text("x" * 40)
    arguments = [a.format(**places) for a in arguments]
    with pytest.raises(SystemExit) as stopped:
        train.main([*arguments, "--out", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_run_goes_on_with_its_own_text_and_not_backwards(text, tmp_path, capsys):
    out, other = tmp_path / "run", tmp_path / "other.txt"
    other.write_text(text.read_text().replace("fox", "dog"))
    run(text, "--out", out, "--steps", 4, *SIZES)
    before = (out / "checkpoint.pt").read_bytes(), (out / "log.jsonl").read_text()
    for arguments, words in (
        ((other,), "FILES: expected the text with which the run began"),
        ((text, "--steps", 3), "--steps: expected at least 4, got 3"),
        ((text, "--eval-every", 0), "--eval-every: expected at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            run(*arguments, "--out", out, "--resume")
        assert words in capsys.readouterr().err
    assert ((out / "checkpoint.pt").read_bytes(), (out / "log.jsonl").read_text()) == before


def test_a_folder_with_a_run_is_not_overwritten(text, tmp_path, capsys):
    out = tmp_path / "run"
    run(text, "--out", out, "--steps", 1, *SIZES)
    with pytest.raises(SystemExit):
        run(text, "--out", out, "--steps", 1, *SIZES)
    assert "--out: expected a folder without a checkpoint" in capsys.readouterr().err


def test_two_ranks_give_the_curve_of_one_and_one_goes_on_alone(text, tmp_path):
    """A sequence split over two processes; the checkpoint does not know how many there were."""
    options = ("--steps", 6, "--eval-every", 3, "--device", "cpu")
    run(text, "--out", tmp_path / "one", *options[:4], *SIZES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    two = [*launch, "2", "-m", *command(text, "--out", tmp_path / "two", *options)[2:]]
    done = subprocess.run(
        [*two, "--context-parallel", "2"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for a, b in zip(log_of(tmp_path / "one"), log_of(tmp_path / "two"), strict=True):
        assert a.keys() == b.keys() and all(abs(a[n] - b[n]) < 1e-4 for n in a)
    run(text, "--out", tmp_path / "two", "--resume", "--steps", 8)
    assert [line["step"] for line in log_of(tmp_path / "two")] == list(range(1, 9))


def test_ranks_that_torchrun_has_not_started_are_named(text, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(text, "--out", tmp_path / "run", "--context-parallel", 2)
    assert "--context-parallel: expected 2 processes" in capsys.readouterr().err

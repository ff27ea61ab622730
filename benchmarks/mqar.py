"""Train the four rules of chapter 15 on recall, three seeds each, on one CPU thread.

    python benchmarks/mqar.py                writes benchmarks/curves/mqar.json
    python benchmarks/mqar.py --out FILE     elsewhere

The task, the model and the training loop are those of the chapter's cells. The same machine and
versions give the same file. It takes a few minutes.
"""

import argparse
import json
import platform
from pathlib import Path

import torch

from kda_edu import teach

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "curves" / "mqar.json"
TASK = dict(pairs=48, keys=8, values=16)
MODEL = dict(hidden_size=32, head_dim=16)
TRAINING = dict(steps=150, batch=32, lr=1e-2, every=10)
LONGER = TRAINING | dict(steps=600, every=50)  # for linear attention where values change
SEEDS = (0, 1, 2)


def runs(rule, change, training):
    """A row for each seed: the accuracy every so many steps."""
    train_recall = teach.from_chapter("ch15", "train_recall")
    rows = []
    for seed in SEEDS:
        curve = train_recall(rule, TASK | dict(change=change), MODEL, seed, **training)
        curve = [round(share, 4) for share in curve]
        rows.append(dict(rule=rule, change=change, seed=seed, accuracy=curve))
        print(f"{rule}, values {'change' if change else 'stay'}, seed {seed}: {curve[-1]}")
    return rows


def record():
    """What was run, a row for each rule, kind of values and seed, and the longer runs."""
    rules = teach.from_chapter("ch15", "RULES")
    rows = [
        row for change in (False, True) for rule in rules for row in runs(rule, change, TRAINING)
    ]
    longer = runs("linear attention", True, LONGER)
    versions = dict(python=platform.python_version(), torch=torch.__version__)
    settings = dict(task=TASK, model=MODEL, training=TRAINING, longer=LONGER, seeds=SEEDS)
    return dict(
        name="mqar",
        device="cpu",
        threads=1,
        **versions,
        settings=settings,
        rows=rows,
        longer=longer,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    text = json.dumps(record(), indent=1)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n")
    print(out)


if __name__ == "__main__":
    main()

"""Trains chapter 12's recall layer for 200 steps, with the oracle and with the kernels.

    python benchmarks/training_curve.py

Runs on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1 (about two minutes). The cells are
those of the chapter, and the chapter draws what this writes: benchmarks/curves/training_curve.json.
"""

import json
from pathlib import Path

import torch

from kda_edu import reference
from kda_edu.teach import from_chapter

STEPS = 200
PATH = Path(__file__).parent / "curves" / "training_curve.json"


def main():
    learn, small_chunks = from_chapter("ch12", "learn", "small_chunks")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    losses = {
        "oracle, float32": learn(reference.recurrent_kda, torch.float32, STEPS, device),
        "kernels, bfloat16": learn(small_chunks, torch.bfloat16, STEPS, device),
    }
    where = torch.cuda.get_device_name() if on_gpu else "a CPU, in Triton's interpreter"
    record = dict(steps=STEPS, torch=torch.__version__, where=where, losses=losses)
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(record, indent=1) + "\n")
    print("written:", PATH)


if __name__ == "__main__":
    main()

"""Train a small KDA language model on text, byte by byte.

    python -m kda_edu.train                          on the help texts that every Python carries
    python -m kda_edu.train book.txt src/ --steps 2000 --out run
    python -m kda_edu.train --resume --out run       go on from the last checkpoint
    torchrun --nproc-per-node 2 -m kda_edu.train --context-parallel 2      each sequence on 2 ranks

Progress goes to the terminal, every loss to OUT/log.jsonl, the model to OUT/checkpoint.pt, which is
written to a new file first and then moved into place. Ctrl-C and SIGTERM save before they end. The
data of a step depend on the seed and the step alone, so a resumed run gives the same curve.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch

from .layers import KDAConfig, KDAForCausalLM
from .layers.model import save_whole

SUFFIXES = (".txt", ".md", ".rst", ".py", ".tex", ".html", ".json", ".csv")
HELD_OUT = 0.1  # the last part of the text is for validation
FINE, INTERRUPTED = 0, 130


@dataclasses.dataclass
class Settings:
    """How to train. lr: the peak, after `warmup` steps; it falls as a cosine to a tenth."""

    steps: int = 300
    batch: int = 16
    length: int = 128
    lr: float = 4e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 4
    save_every: int = 50

    def __post_init__(self):
        for name in ("steps", "batch", "length", "eval_every", "eval_batches", "save_every"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag}: expected at least 1, got {getattr(self, name)}")
        if not self.lr > 0:
            raise ValueError(f"--lr: expected a number > 0, got {self.lr}")


def read_text(paths):
    """The bytes of files, and of the text files in folders, as one tensor of uint8."""
    if not paths:
        from pydoc_data.topics import topics

        return _as_bytes("\n\n".join(topics[name] for name in sorted(topics)).encode())
    parts = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"FILES: expected a file or folder, found no {path}")
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if path.is_dir() and not files:
            raise ValueError(f"FILES: expected text ({', '.join(SUFFIXES)}) in {path}, found none")
        parts += [p.read_bytes() for p in (files if path.is_dir() else [path])]
    text = b"\n\n".join(parts)
    if not text.strip():
        raise ValueError(f"FILES: expected some text, got {len(text)} bytes of white space")
    return _as_bytes(text)


def _as_bytes(text):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def split(text, length):
    """(training part, validation part), each long enough for one window."""
    border = int(len(text) * (1 - HELD_OUT))
    if len(text) - border < length + 1:
        needed = math.ceil((length + 1) / HELD_OUT) + 1
        raise ValueError(
            f"FILES: expected at least {needed} bytes for --length {length}, got {len(text)}"
        )
    return text[:border], text[border:]


def batch_of(text, settings, step):
    """Windows [batch, length + 1] of the text; which ones follows from the seed and the step."""
    draw = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    start = torch.randint(len(text) - settings.length, (settings.batch,), generator=draw)
    return text[start[:, None] + torch.arange(settings.length + 1)].long()


def learning_rate(settings, step):
    """Linear warm-up, then half a cosine down to a tenth of the peak."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def make_optimiser(model, settings):
    """AdamW; no decay on vectors (norms, biases, A_log, dt_bias)."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        dict(params=matrices, weight_decay=settings.weight_decay),
        dict(params=vectors, weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))


class Alone:
    """One process: what `kda_edu.distributed.training.Ranks` does for several."""

    first = True

    def loss(self, model, tokens):
        return model.loss(tokens)

    def sum(self, share):
        return share

    def sum_gradients(self, model):
        pass

    def any(self, flag):
        return flag

    def close(self):
        pass


ALONE = Alone()


def train_step(model, optimiser, tokens, settings, step, ranks=ALONE):
    """One update; returns the loss before it. bfloat16 products on a GPU, float32 weights."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(settings, step)
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        loss = ranks.loss(model, tokens)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    ranks.sum_gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimiser.step()
    return ranks.sum(loss).item()


@torch.no_grad()
def validate(model, text, settings, device, ranks=ALONE):
    """Mean loss over windows spread evenly over the held-out text, in nats per byte."""
    count = settings.batch * settings.eval_batches
    start = torch.linspace(0, len(text) - settings.length - 1, count).long()
    windows = text[start[:, None] + torch.arange(settings.length + 1)].long()
    model.eval()
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        parts = (part.to(device) for part in windows.split(settings.batch))
        losses = [ranks.sum(ranks.loss(model, part)).item() for part in parts]
    model.train()
    return sum(losses) / len(losses)


class Run:
    """A folder with a checkpoint and a log."""

    def __init__(self, folder, text=None):
        """text: the bytes that are trained on; a run does not go on with others."""
        self.folder = Path(folder)
        self.text = None if text is None else hashlib.sha256(text.numpy().tobytes()).hexdigest()
        self.checkpoint, self.log = self.folder / "checkpoint.pt", self.folder / "log.jsonl"

    def save(self, model, optimiser, settings, step):
        """Write to a new file, then move it: a crash leaves the old checkpoint whole."""
        state = dict(
            config=dataclasses.asdict(model.config),
            model=model.state_dict(),
            optimiser=optimiser.state_dict(),
            settings=dataclasses.asdict(settings),
            step=step,
            text=self.text,
        )
        save_whole(state, self.checkpoint)

    def load(self, device):
        """The last checkpoint, if it is of the same text."""
        if not self.checkpoint.is_file():
            raise FileNotFoundError(f"--resume: expected a checkpoint, found no {self.checkpoint}")
        state = torch.load(self.checkpoint, map_location=device, weights_only=True)
        if state["text"] != self.text:
            raise ValueError("FILES: expected the text with which the run began, got another")
        return state

    def cut_log(self, step):
        """Drop what came after a step, so that no step stands there twice."""
        kept = [line for line in self.read_log() if line["step"] <= step]
        new = self.log.with_suffix(".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(new, self.log)

    def read_log(self):
        """The lines of the log; a last line that was cut off is left out."""
        lines = []
        for text in self.log.read_text().splitlines() if self.log.is_file() else ():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
        return lines

    def write(self, **line):
        with open(self.log, "a") as file:
            file.write(json.dumps(line) + "\n")


class Interruption:
    """Notes Ctrl-C and SIGTERM, so that the step in progress can end first."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number, frame):
        if self.asked:  # asked twice: at once
            raise KeyboardInterrupt
        self.asked = True


def train(
    model, optimiser, parts, settings, run, device,
    start=0, ranks=ALONE, stop=lambda: False, bar=None,
):  # fmt: skip
    """Train from step `start`; returns the number of steps done. `stop()` ends it early.

    parts: (training text, validation text). bar: a progress bar with update and set_postfix.
    """
    text, held_out = parts
    model.train()
    step = start
    for step in range(start, settings.steps):
        if ranks.any(stop()):
            break
        tokens = batch_of(text, settings, step).to(device)
        loss = train_step(model, optimiser, tokens, settings, step, ranks)
        done, line = step + 1, dict(step=step + 1, loss=loss)
        if done % settings.eval_every == 0 or done == settings.steps:
            line["validation"] = validate(model, held_out, settings, device, ranks)
        if ranks.first:
            run.write(**line)
        if bar is not None:
            bar.update()
            bar.set_postfix({name: f"{x:.3f}" for name, x in line.items() if name != "step"})
        if done % settings.save_every == 0 and ranks.first:
            run.save(model, optimiser, settings, done)
    else:
        step = settings.steps
    if ranks.first:
        run.save(model, optimiser, settings, step)
    return step


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m kda_edu.train", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", nargs="*", metavar="FILES", help="text files, or folders of them")
    parser.add_argument("--out", default="run", help="folder for checkpoint and log")
    parser.add_argument("--device", default=None, help="cpu or cuda; default cuda where there is")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint.pt")
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=field.type, help=f"default {field.default}")
    for name in ("layers", "heads", "head-dim", "hidden-size"):
        parser.add_argument(f"--{name}", type=int, help="size of the model")
    parser.add_argument("--softmax-every", type=int, help="softmax attention every so many layers")
    parser.add_argument(
        "--context-parallel", type=int, metavar="N", help="split sequences over N ranks of torchrun"
    )
    return parser, parser.parse_args(arguments)


def prepare(a, text):
    """(model, optimiser, settings, first step, run, device, ranks) from parsed arguments."""
    device = torch.device(a.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: expected cpu, since there is no CUDA GPU here, got cuda")
    run, ranks = Run(a.out, text), ALONE
    if a.context_parallel is not None:
        from .distributed.training import Ranks

        ranks = Ranks(a.context_parallel, device.type)
        device = ranks.device
    given = {f.name: getattr(a, f.name) for f in dataclasses.fields(Settings)}
    given = {name: value for name, value in given.items() if value is not None}
    sizes = dict(
        num_layers=a.layers,
        num_heads=a.heads,
        head_dim=a.head_dim,
        hidden_size=a.hidden_size,
        softmax_every=a.softmax_every,
    )
    sizes = {name: value for name, value in sizes.items() if value is not None}
    if a.resume:
        if sizes:
            raise ValueError(f"--resume: the model's sizes are the checkpoint's, got {sizes}")
        state = run.load(device)
        settings = Settings(**state["settings"] | given)
        if settings.steps < state["step"]:
            raise ValueError(f"--steps: expected at least {state['step']}, got {settings.steps}")
        if ranks.first:
            run.cut_log(state["step"])
        model = KDAForCausalLM(KDAConfig(**state["config"])).to(device)
        model.load_state_dict(state["model"])
        optimiser = make_optimiser(model, settings)
        optimiser.load_state_dict(state["optimiser"])
        return model, optimiser, settings, state["step"], run, device, ranks
    if ranks.any(run.checkpoint.exists()):
        raise ValueError(
            f"--out: expected a folder without a checkpoint, got {a.out}; --resume goes on from it"
        )
    settings = Settings(**given)
    torch.manual_seed(settings.seed)
    model = KDAForCausalLM(KDAConfig(**sizes)).to(device)
    if ranks.first:
        run.folder.mkdir(parents=True, exist_ok=True)
        run.log.write_text("")
    return model, make_optimiser(model, settings), settings, 0, run, device, ranks


def main(arguments=None):
    parser, a = parse(arguments)
    try:
        from tqdm import tqdm
    except ImportError:
        parser.exit(2, "training needs tqdm: pip install tqdm, or kda_edu[train]\n")
    try:
        text = read_text(a.files)
        model, optimiser, settings, start, run, device, ranks = prepare(a, text)
        parts = split(text, settings.length)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    count = sum(p.numel() for p in model.parameters())
    interruption, began = Interruption(), time.monotonic()
    if ranks.first:
        print(f"{len(text)} bytes of text, {count} parameters, on {device}")
    hidden = None if ranks.first else True  # None: shown where there is a terminal
    with tqdm(total=settings.steps, initial=start, unit="step", disable=hidden) as bar:
        stop = lambda: interruption.asked  # noqa: E731
        step = train(
            model, optimiser, parts, settings, run, device, start, ranks, stop=stop, bar=bar
        )
    ranks.close()
    if not ranks.first:
        return INTERRUPTED if step < settings.steps else FINE
    print(f"step {step}, {time.monotonic() - began:.0f} s, saved in {run.checkpoint}")
    last = [line["validation"] for line in run.read_log() if "validation" in line]
    if last:
        print(f"validation loss {last[-1]:.3f} nats per byte")
    return INTERRUPTED if step < settings.steps else FINE


if __name__ == "__main__":
    sys.exit(main())

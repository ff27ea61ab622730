"""What chapter 15 shows of a trained language model, taken from a run of `kda_edu.train`.

    python -m kda_edu.train --steps 300 --out run       4 minutes on one CPU core
    python benchmarks/language_model.py run             benchmarks/curves/language_model.json

    python benchmarks/language_model.py run --short --device "NVIDIA H200" --out FILE

The file holds the log, samples before and after training, and what the gates and one state do on
a sentence, rounded. It stays far smaller than the checkpoint.
"""

import argparse
import dataclasses
import json
import platform
from pathlib import Path

import torch

from kda_edu import reference
from kda_edu.layers import Cache, KDAConfig, KDAForCausalLM
from kda_edu.train import Run, Settings

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "curves" / "language_model.json"
SENTENCE = "The expression list is evaluated once; it should yield an iterable object."
PROMPT = "The "
SAMPLE = dict(max_new_tokens=240, temperature=0.7, seed=0)
LAYER, HEAD = 2, 0  # of the state that is kept
TOKENS = (2, 18, 37, 53, 73)  # the ends of words


def as_tokens(text):
    return torch.tensor([list(text.encode())])  # [1, T]


def sample(model):
    """PROMPT and what the model goes on with; bytes that are no text become a dot."""
    drawn = model.generate(as_tokens(PROMPT), **SAMPLE)[0].tolist()
    return "".join(chr(b) if 32 <= b < 127 or b == 10 else "·" for b in drawn)


@torch.no_grad()
def gates(model, text):
    """Log decays g of every layer on a text: [layers, T, HV, K]."""
    seen = []
    hooks = [
        block.attn.f_proj.register_forward_hook(lambda module, x, y: seen.append(y))
        for block in model.blocks
    ]
    model(as_tokens(text))
    for hook in hooks:
        hook.remove()
    layers = [block.attn for block in model.blocks]
    return torch.stack(
        [
            reference.kda_gate(
                y[0].unflatten(-1, (a.num_v_heads, a.head_dim)), a.A_log, a.dt_bias, a.lower_bound
            )
            for a, y in zip(layers, seen, strict=True)
        ]
    )


@torch.no_grad()
def states(model, text):
    """The states of all layers after each token: [T, layers, HV, K, V]."""
    cache, kept = Cache(), []
    for token in as_tokens(text).T:
        model(token[None], past_key_values=cache, use_cache=True)
        kept.append(torch.cat([cache.get(i)["state"] for i in range(len(model.blocks))]))
    return torch.stack(kept)


def rounded(x, digits):
    """Nested lists of a tensor's numbers, with so many digits after the point."""
    return json.loads(
        json.dumps(x.double().tolist()), parse_float=lambda n: round(float(n), digits)
    )


def record(folder, device, short=False):
    """short: only the settings, the curves and the samples."""
    run = Run(folder)
    saved = torch.load(run.checkpoint, map_location="cpu", weights_only=True)
    settings, config = Settings(**saved["settings"]), KDAConfig(**saved["config"])
    torch.manual_seed(settings.seed)
    before = KDAForCausalLM(config).eval()  # as kda_edu.train began
    after = KDAForCausalLM.load(run.checkpoint).eval()
    log = run.read_log()
    made = dict(
        name="language_model",
        device=device,
        python=platform.python_version(),
        torch=torch.__version__,
        settings=dataclasses.asdict(settings),
        config=dataclasses.asdict(config),
        parameters=sum(p.numel() for p in after.parameters()),
        loss=[round(line["loss"], 4) for line in log],
        validation={line["step"]: round(line["validation"], 4) for line in log if len(line) > 2},
        prompt=PROMPT,
        sampling=SAMPLE,
        sample_before=sample(before),
        sample_after=sample(after),
    )
    return made if short else made | of_a_sentence(before, after)


def of_a_sentence(before, after):
    """What the gates and one state do on SENTENCE."""
    memory = states(after, SENTENCE)
    return dict(
        sentence=SENTENCE,
        log_decay=rounded(gates(after, SENTENCE).mean(1), 6),  # [layers, HV, K]
        log_decay_before=rounded(gates(before, SENTENCE).mean(1), 6),
        row_size=rounded(memory.square().mean((0, 4)).sqrt(), 5),  # [layers, HV, K], rms
        state=dict(
            layer=LAYER,
            head=HEAD,
            tokens=TOKENS,
            values=rounded(memory[list(TOKENS), LAYER, HEAD], 3),  # [5, K, V]
        ),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the folder that training wrote")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--short", action="store_true", help="settings, curves and samples only")
    parser.add_argument("--device", default="cpu", help="what it was trained on, for the record")
    a = parser.parse_args()
    torch.set_num_threads(1)
    text = json.dumps(record(a.run, a.device, a.short))
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(text + "\n")
    print(f"{a.out}: {len(text) // 1000} kB")


if __name__ == "__main__":
    main()

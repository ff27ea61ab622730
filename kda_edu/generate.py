"""Print what a trained model goes on with, as it is drawn.

python -m kda_edu.generate run/checkpoint.pt --prompt "The for statement"
"""

import argparse
import codecs
import sys

import torch

from .layers import KDAForCausalLM


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m kda_edu.generate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file that training wrote")
    parser.add_argument("--prompt", default="\n", help="text to go on from")
    parser.add_argument("--bytes", type=int, default=400, help="how many bytes to draw")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    parser.add_argument("--top-k", type=int, help="draw among the k likeliest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args(arguments)
    prompt = a.prompt.encode()
    try:
        if not prompt:
            raise ValueError("--prompt: expected at least one character, got none")
        model = KDAForCausalLM.load(a.checkpoint, a.device)
        tokens = torch.tensor([list(prompt)], device=a.device)
        drawn = model.stream(tokens, a.bytes, temperature=a.temperature, top_k=a.top_k, seed=a.seed)
        sys.stdout.write(a.prompt)
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in drawn:
            sys.stdout.write(text.decode(bytes(token.tolist())))
            sys.stdout.flush()
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    sys.stdout.write(text.decode(b"", final=True) + "\n")


if __name__ == "__main__":
    main()

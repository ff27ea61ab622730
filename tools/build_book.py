"""Build the book into book/_build/html, with every warning an error, and print where it starts.

Jupyter Book runs from the repository's root, so that pages can link to chapters/ and book/ by the
paths that also work when the files are read as they are.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [
    *(sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", "."),
    *("--config", "book/_config.yml", "--toc", "book/_toc.yml", "--path-output", "book"),
    *("--all", "--quiet", "-W", "-n", "--keep-going"),
]


def main():
    done = subprocess.run(COMMAND, cwd=ROOT, stdout=subprocess.DEVNULL)  # warnings: stderr
    landing = ROOT / "book" / "_build" / "html" / "index.html"
    if done.returncode or not landing.exists():
        print("The book was not built; the warnings above count as errors.", file=sys.stderr)
        return done.returncode or 1
    print(f"The book is built. Open {landing}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

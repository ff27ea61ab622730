"""Refuse a Python that pyproject.toml does not allow. Written so that an old one can read it."""

import re
import sys

with open("pyproject.toml") as file:
    low, high = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', file.read()).groups()
if not (3, int(low)) <= sys.version_info[:2] < (3, int(high)):
    found = "%d.%d.%d" % sys.version_info[:3]  # noqa: UP031
    last = "3.%d" % (int(high) - 1)  # noqa: UP031
    sys.exit(
        "This is Python %s (%s), and Python 3.%s to %s is needed.\n"  # noqa: UP031
        "Name another: make setup PYTHON=python%s" % (found, sys.executable, low, last, last)
    )

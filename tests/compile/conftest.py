"""These tests compile kernels, which an interpreting process cannot: they are left out of it."""

import os

collect_ignore_glob = ["test_*.py"] if os.environ.get("TRITON_INTERPRET", "0") == "1" else []

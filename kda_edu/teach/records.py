"""Measured numbers: the only way that the book reads them, and that the benchmarks write them.

A record is one file, `benchmarks/results/<gpu>/<name>.json`: what was run where, and a row for
each thing that was timed in that run, peers included. A row holds the error against the oracle
in the same run; a time without a passing error is refused, and so is a rate above what the
chip can do. Times are in milliseconds, bytes and flops per call.

    {"name": "chunk_forward", "gpu": "NVIDIA H200", "driver": "...", "torch": "...",
     "triton": "...", "date": "2026-12-01", "commit": "...", "kernels": "<kernels_hash()>",
     "rows": [{"impl": "kda_edu", "shape": {"B": 1, "T": 8192, "H": 96, "K": 128, "V": 128},
               "dtype": "bfloat16", "math": "bfloat16", "repeats": 100,
               "median": 1.0, "p20": 0.9, "p80": 1.1,
               "bytes": 1000000, "flops": 1000000, "error": 0.002, "budget": 0.006}]}

`math` is the precision of the products ("tf32" for float32 inputs, say) and decides which
ceiling applies; it defaults to `dtype`. Rows may have more keys, e.g. "mode": "forward".
"""

import ast
import datetime
import hashlib
import json
import math
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
KERNELS = ROOT / "kda_edu" / "kernels"

# What a chip can do at most: bytes/s from its memory, flop/s by precision, dense.
# Sources: NVIDIA data sheets "H200 Tensor Core GPU" (SXM), "H100 Tensor Core GPU" (SXM) and
# "A100 80GB" (SXM); tensor-core figures there are with sparsity for Hopper, halved here.
CEILINGS = {
    "h200": {
        "bandwidth": 4.8e12,
        "flops": {"bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12},
    },
    "h100-80gb-hbm3": {
        "bandwidth": 3.35e12,
        "flops": {"bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12},
    },
    "a100-sxm4-80gb": {
        "bandwidth": 2.039e12,
        "flops": {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12},
    },
}

HEADER = ("name", "gpu", "driver", "torch", "triton", "date", "commit", "kernels")
NUMBERS = ("median", "p20", "p80", "bytes", "flops", "error", "budget")
MOST_SPREAD = 2.0  # p80 / p20
LEAST_REPEATS = 3
LARGEST_BUDGET = 0.05


class RecordError(ValueError):
    """A record that must not be used: it names the row, the key and what is wrong with it."""


def slug(gpu):
    """The folder name of a GPU: "NVIDIA H100 80GB HBM3" -> "h100-80gb-hbm3"."""
    short = re.sub(r"^nvidia\s+", "", gpu.strip().lower())
    return re.sub(r"[^a-z0-9]+", "-", short).strip("-")


def ceilings(gpu):
    """Bandwidth (bytes/s) and flop/s by precision of a GPU. Raises RecordError if unknown."""
    if slug(gpu) not in CEILINGS:
        raise RecordError(f"gpu: no ceilings known for {gpu!r}; known are {', '.join(CEILINGS)}")
    return CEILINGS[slug(gpu)]


def load(name, gpu=None, folder=None):
    """The record of that name, validated.

    gpu     a folder name or device name; default the newest record of that name, whichever
            machine it was made on. Every reader sees the same one.
    folder  where the results are, default benchmarks/results of this project.

    Raises FileNotFoundError that says how to make one; RecordError for one that is refused.
    """
    folder = Path(folder or RESULTS)
    where = slug(gpu) if gpu else "*"
    found = [_read(path) for path in sorted(folder.glob(f"{where}/{name}.json"))]
    if not found:
        others = sorted(f"{path.parent.name}/{path.stem}" for path in folder.glob("*/*.json"))
        raise FileNotFoundError(
            f"no measurement {name!r} for {gpu or 'any GPU'} in {folder.name}/; "
            f"there are: {', '.join(others) or 'none'}. "
            "Make one with `make bench` on a machine with a GPU."
        )
    return max(found, key=lambda record: (record["date"], record["gpu"]))


def find(name, gpu=None, folder=None):
    """As `load`, but None, and a printed line that says so, where nothing has been measured yet."""
    try:
        return load(name, gpu, folder)
    except FileNotFoundError:
        print(f"Not recorded yet: `python benchmarks/run.py {name}` on a GPU does it.")
        return None


def write(record, folder=None):
    """Validate a record and write its file; returns the path."""
    validate(record)
    path = Path(folder or RESULTS) / slug(record["gpu"]) / f"{record['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return path


def validate(record):
    """Return the record, or raise RecordError for the first thing that is wrong with it."""
    if not isinstance(record, dict):
        raise RecordError(f"record: expected a dict, got {type(record).__name__}")
    for key in HEADER:
        if not (isinstance(record.get(key), str) and record[key].strip()):
            raise RecordError(f"{key}: expected a text, got {record.get(key)!r}")
    if not re.fullmatch(r"[a-z0-9_]+", record["name"]):
        raise RecordError(
            f"name: expected lower-case letters, digits and _, got {record['name']!r}"
        )
    try:
        datetime.date.fromisoformat(record["date"])
    except ValueError:
        raise RecordError(f"date: expected YYYY-MM-DD, got {record['date']!r}") from None
    if not (isinstance(record.get("rows"), list) and record["rows"]):
        raise RecordError("rows: expected a list with at least one row")
    chip = ceilings(record["gpu"])
    for number, row in enumerate(record["rows"]):
        _validate_row(row, f"row {number}", chip)
    _validate_growth(record["rows"])
    return record


def kernels_hash(folder=None):
    """SHA-256 of the code in kda_edu/kernels/*.py; comments, docstrings, blank lines left out."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder or KERNELS).glob("*.py")):
        digest.update(f"{path.name}\n{_code(path.read_text(encoding='utf-8'))}".encode())
    return digest.hexdigest()


def is_fresh(record):
    """True if the kernels are still those that were measured."""
    return record["kernels"] == kernels_hash()


def rows(record, **wanted):
    """The rows whose keys, or sizes in their shape, have these values, e.g. impl="fla", T=8192."""
    return [
        row
        for row in record["rows"]
        if all({**row, **row["shape"]}.get(key) == value for key, value in wanted.items())
    ]


def row(record, **wanted):
    """The one such row. Raises KeyError if there is none or more than one."""
    found = rows(record, **wanted)
    if len(found) != 1:
        raise KeyError(f"{record['name']}: {len(found)} rows with {wanted}, expected one")
    return found[0]


def bandwidth(row):
    """Bytes per second that a row reached."""
    return row["bytes"] / (row["median"] * 1e-3)


def rate(row):
    """Floating-point operations per second that a row reached."""
    return row["flops"] / (row["median"] * 1e-3)


def speedup(slow, fast):
    """How many times faster the second row is than the first, from their medians."""
    return slow["median"] / fast["median"]


def provenance(record):
    """The sentence that stands below a measured picture or table."""
    stale = "" if is_fresh(record) else " The kernels have changed since."
    return (
        f"Recorded on {record['gpu']} (driver {record['driver']}), torch {record['torch']}, "
        f"triton {record['triton']}, {record['date']}, commit {record['commit'][:9]}.{stale}"
    )


def environment(name, commit=None):
    """The header of a new record: this machine, now. Needs a CUDA GPU.

    commit  default: `git rev-parse HEAD`; give it where the code runs outside its repository.
    """
    import torch
    import triton

    if not torch.cuda.is_available():
        raise RuntimeError(
            "environment: expected a CUDA GPU, found none: times of a CPU are no record"
        )
    return {
        "name": name,
        "gpu": torch.cuda.get_device_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit or _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "kernels": kernels_hash(),
    }


def _read(path):
    try:
        record = validate(json.loads(path.read_text(encoding="utf-8")))
    except (RecordError, json.JSONDecodeError) as error:
        raise RecordError(f"{path.parent.name}/{path.name}: {error}") from None
    if (slug(record["gpu"]), record["name"]) != (path.parent.name, path.stem):
        raise RecordError(
            f"{path.parent.name}/{path.name}: it says it is {record['name']} on {record['gpu']}"
        )
    return record


def _validate_row(row, place, chip):
    if not isinstance(row, dict):
        raise RecordError(f"{place}: expected a dict, got {type(row).__name__}")
    for key in ("impl", "dtype"):
        if not (isinstance(row.get(key), str) and row[key]):
            raise RecordError(f"{place}: {key}: expected a text, got {row.get(key)!r}")
    shape = row.get("shape")
    if not (isinstance(shape, dict) and shape and all(_is_count(n) for n in shape.values())):
        raise RecordError(f"{place}: shape: expected sizes by name, got {shape!r}")
    if not (_is_count(row.get("repeats")) and row["repeats"] >= LEAST_REPEATS):
        raise RecordError(
            f"{place}: repeats: expected an integer >= {LEAST_REPEATS}, got {row.get('repeats')!r}"
        )
    for key in NUMBERS:
        if not _is_number(row.get(key)):
            raise RecordError(
                f"{place}: {key}: expected a finite number >= 0, got {row.get(key)!r}"
            )
    _validate_error(row, place)
    _validate_times(row, place)
    _validate_ceilings(row, place, chip)


def _validate_error(row, place):
    if not 0 < row["budget"] <= LARGEST_BUDGET:
        raise RecordError(
            f"{place}: budget: expected above 0 and at most {LARGEST_BUDGET}, got {row['budget']}"
        )
    if row["error"] > row["budget"]:
        raise RecordError(
            f"{place}: error {row['error']} is above its budget {row['budget']}: the time of a "
            "wrong result is no measurement"
        )


def _validate_times(row, place):
    if not 0 < row["p20"] <= row["median"] <= row["p80"]:
        raise RecordError(
            f"{place}: expected 0 < p20 <= median <= p80, got "
            f"{row['p20']}, {row['median']}, {row['p80']}"
        )
    if row["p80"] > MOST_SPREAD * row["p20"]:
        raise RecordError(
            f"{place}: p80 / p20 is {row['p80'] / row['p20']:.2f}, above {MOST_SPREAD}: too noisy"
        )


def _validate_ceilings(row, place, chip):
    if bandwidth(row) > chip["bandwidth"]:
        raise RecordError(
            f"{place}: bytes / median is {bandwidth(row):.3g} B/s, above the chip's "
            f"{chip['bandwidth']:.3g}"
        )
    precision = row.get("math", row["dtype"])
    if precision not in chip["flops"]:
        raise RecordError(
            f"{place}: math: expected one of {', '.join(chip['flops'])}, got {precision!r}"
        )
    if rate(row) > chip["flops"][precision]:
        raise RecordError(
            f"{place}: flops / median is {rate(row):.3g} flop/s, above the chip's "
            f"{chip['flops'][precision]:.3g} for {precision}"
        )


def _validate_growth(rows):
    """More tokens must not take clearly less time, all else equal."""
    for a in rows:
        for b in rows:
            T = "T"
            if T not in a["shape"] or T not in b["shape"] or a["shape"][T] >= b["shape"][T]:
                continue
            if _all_but_time(a) == _all_but_time(b) and b["median"] < 0.8 * a["median"]:
                raise RecordError(
                    f"{a['impl']}: T = {b['shape'][T]} took {b['median']} ms, less than T = "
                    f"{a['shape'][T]} with {a['median']} ms"
                )


def _all_but_time(row):
    """What makes two rows comparable: everything but the sizes in T and what was measured."""
    left_out = (*NUMBERS, "repeats", "shape")
    fixed = {key: value for key, value in row.items() if key not in left_out}
    return fixed, {key: n for key, n in row["shape"].items() if key != "T"}


def _is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x < math.inf


def _is_count(x):
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def _code(source):
    """Source without docstrings, comment lines, blank lines and trailing spaces."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    for i in range(first.lineno - 1, first.end_lineno):
                        lines[i] = ""
    kept = (line.rstrip() for line in lines)
    return "\n".join(line for line in kept if line and not line.lstrip().startswith("#"))


def _output(*command):
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return ran.stdout.strip().splitlines()[0]

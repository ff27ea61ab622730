"""Measured numbers: complete, plausible, fresh, and refused where they are not."""

import copy
import json

import pytest
import torch

from kda_edu.teach import records
from kda_edu.teach.records import RecordError

HASH = records.kernels_hash()


def good():
    """A record that passes: 1e12 bytes/s and 1e14 flop/s in its first row."""
    row = {
        "impl": "kda_edu",
        "mode": "forward",
        "shape": {"B": 1, "T": 8192, "H": 96, "K": 128, "V": 128},
        "dtype": "bfloat16",
        "repeats": 100,
        "median": 1.0,
        "p20": 0.9,
        "p80": 1.1,
        "bytes": 10**9,
        "flops": 10**11,
        "error": 2e-3,
        "budget": 6e-3,
    }
    long = {**row, "shape": {**row["shape"], "T": 16384}, "median": 2.0, "p20": 1.9, "p80": 2.2}
    peer = {**row, "impl": "fla", "median": 3.0, "p20": 2.9, "p80": 3.2}
    return {
        "name": "chunk_forward",
        "gpu": "NVIDIA H200",
        "driver": "570.1",
        "torch": "2.13.0",
        "triton": "3.7.1",
        "date": "2026-12-01",
        "commit": "0123456789abcdef",
        "kernels": HASH,
        "rows": [row, long, peer],
    }


def changed(**row_changes):
    record = good()
    record["rows"][0].update(row_changes)
    return record


def test_what_is_written_is_what_is_read(tmp_path):
    path = records.write(good(), tmp_path)
    assert path == tmp_path / "h200" / "chunk_forward.json"
    assert records.load("chunk_forward", folder=tmp_path) == good()
    assert records.load("chunk_forward", gpu="NVIDIA H200", folder=tmp_path) == good()
    before = path.read_bytes()
    assert records.write(good(), tmp_path).read_bytes() == before


def test_rates_and_ratios_come_from_the_rows():
    record = good()
    ours = records.row(record, impl="kda_edu", T=8192)
    peer = records.row(record, impl="fla")
    assert records.bandwidth(ours) == pytest.approx(1e12)
    assert records.rate(ours) == pytest.approx(1e14)
    assert records.speedup(peer, ours) == pytest.approx(3.0)
    assert len(records.rows(record, impl="kda_edu")) == 2
    with pytest.raises(KeyError, match="2 rows with .*'impl': 'kda_edu'"):
        records.row(record, impl="kda_edu")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(error=7e-3), "row 0: error 0.007 is above its budget 0.006"),
        (dict(error=float("nan")), "row 0: error: expected a finite number"),
        (dict(error=None), "row 0: error: expected a finite number >= 0, got None"),
        (dict(budget=1.0), "row 0: budget: expected above 0 and at most 0.05"),
        (dict(budget=0.0, error=0.0), "row 0: budget: expected above 0"),
        (
            dict(bytes=4_900_000_000),
            "row 0: bytes / median is 4.9e\\+12 B/s, above the chip's 4.8e",
        ),
        (
            dict(flops=990_000_000_000),
            "row 0: flops / median is 9.9e\\+14 flop/s, above .* bfloat16",
        ),
        (dict(flops=500 * 10**9, math="tf32"), "above the chip's 4.94e\\+14 for tf32"),
        (dict(flops=70 * 10**9, dtype="float32"), "above the chip's 6.7e\\+13 for float32"),
        (dict(math="int4"), "row 0: math: expected one of .*, got 'int4'"),
        (dict(p20=1.05), "expected 0 < p20 <= median <= p80"),
        (dict(p80=0.95), "expected 0 < p20 <= median <= p80"),
        (dict(median=0.0, p20=0.0), "expected 0 < p20"),
        (dict(p80=1.9), "p80 / p20 is 2.11, above 2.0: too noisy"),
        (dict(median=float("inf")), "median: expected a finite number"),
        (dict(median=True), "median: expected a finite number"),
        (dict(repeats=2), "repeats: expected an integer >= 3, got 2"),
        (dict(shape={}), "shape: expected sizes by name"),
        (dict(shape={"T": 0}), "shape: expected sizes by name"),
        (dict(impl=""), "impl: expected a text"),
        (dict(median=4.0, p20=3.9, p80=4.1), "T = 16384 took 2.0 ms, less than T = 8192 with 4.0"),
    ],
)
def test_a_row_that_cannot_be_is_refused(changes, message):
    assert records.validate(good())
    with pytest.raises(RecordError, match=message):
        records.validate(changed(**changes))


@pytest.mark.parametrize("key", records.HEADER)
def test_the_header_is_complete(key):
    for value in ("", None):
        with pytest.raises(RecordError, match=f"{key}: expected"):
            records.validate({**good(), key: value})
    record = good()
    del record[key]
    with pytest.raises(RecordError, match=f"{key}: expected a text, got None"):
        records.validate(record)


@pytest.mark.parametrize("key", records.NUMBERS)
def test_a_row_is_complete(key):
    record = good()
    del record["rows"][1][key]
    with pytest.raises(RecordError, match=f"row 1: {key}: expected a finite number >= 0, got None"):
        records.validate(record)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(date="1.12.2026"), "date: expected YYYY-MM-DD"),
        (dict(name="../x"), "name: expected lower-case letters"),
        (dict(gpu="NVIDIA T4"), "gpu: no ceilings known for 'NVIDIA T4'; known are h200"),
        (dict(rows=[]), "rows: expected a list with at least one row"),
        (dict(rows=[3]), "row 0: expected a dict, got int"),
    ],
)
def test_a_header_that_cannot_be_is_refused(change, message):
    with pytest.raises(RecordError, match=message):
        records.validate({**good(), **change})


def test_a_refused_record_is_not_written(tmp_path):
    with pytest.raises(RecordError):
        records.write(changed(error=1.0), tmp_path)
    assert not list(tmp_path.rglob("*"))


def test_a_missing_record_says_how_to_make_one(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="no measurement 'x' for any GPU .*there are: none.*GPU"
    ):
        records.load("x", folder=tmp_path)
    records.write(good(), tmp_path)
    with pytest.raises(FileNotFoundError, match="for a100 in .*there are: h200/chunk_forward"):
        records.load("chunk_forward", gpu="a100", folder=tmp_path)


def test_find_goes_on_without_a_record_but_not_with_a_bad_one(tmp_path, capsys):
    assert records.find("chunk_forward", folder=tmp_path) is None
    assert capsys.readouterr().out.startswith("Not recorded yet: `python benchmarks/run.py chunk_f")
    path = records.write(good(), tmp_path)
    assert records.find("chunk_forward", folder=tmp_path) == records.load(
        "chunk_forward", folder=tmp_path
    )
    assert capsys.readouterr().out == ""
    path.write_text(path.read_text().replace("H200", "H100"))
    with pytest.raises(records.RecordError):
        records.find("chunk_forward", folder=tmp_path)


def test_a_file_edited_by_hand_is_refused(tmp_path):
    path = records.write(good(), tmp_path)
    record = json.loads(path.read_text())
    record["rows"][0]["error"] = 0.5
    path.write_text(json.dumps(record))
    with pytest.raises(RecordError, match="h200/chunk_forward.json: row 0: error 0.5"):
        records.load("chunk_forward", folder=tmp_path)
    path.write_text("{")
    with pytest.raises(RecordError, match="h200/chunk_forward.json: "):
        records.load("chunk_forward", folder=tmp_path)
    path.write_text(json.dumps({**good(), "name": "other"}))
    with pytest.raises(RecordError, match="it says it is other on NVIDIA H200"):
        records.load("chunk_forward", folder=tmp_path)


def test_the_newest_record_is_read_whatever_the_machine(tmp_path):
    records.write(good(), tmp_path)
    newer = copy.deepcopy(good())
    newer.update(gpu="NVIDIA H100 80GB HBM3", date="2026-12-02")
    assert records.write(newer, tmp_path).parent.name == "h100-80gb-hbm3"
    assert records.load("chunk_forward", folder=tmp_path)["date"] == "2026-12-02"
    assert records.load("chunk_forward", gpu="h200", folder=tmp_path)["date"] == "2026-12-01"


def test_the_hash_follows_the_code_and_nothing_else(tmp_path):
    source = '"""What it is."""\n\n\ndef f(x):\n    """Doc."""\n    return x + 1  # one\n'
    file = tmp_path / "a.py"
    file.write_text(source)
    first = records.kernels_hash(tmp_path)
    file.write_text(
        source.replace("What it is.", "Other\nwords.").replace("Doc.", "More\n    doc.")
    )
    assert records.kernels_hash(tmp_path) == first
    file.write_text("# a comment\n\n" + source.replace("    return", "    # why\n    return"))
    assert records.kernels_hash(tmp_path) == first
    file.write_text(source.replace("x + 1", "x - 1"))
    assert records.kernels_hash(tmp_path) != first
    file.write_text(source)
    assert records.kernels_hash(tmp_path) == first
    file.rename(tmp_path / "b.py")
    assert records.kernels_hash(tmp_path) != first


def test_provenance_says_where_when_and_whether_it_is_stale():
    record = {**good(), "kernels": records.kernels_hash()}
    assert records.is_fresh(record)
    assert records.provenance(record) == (
        "Recorded on NVIDIA H200 (driver 570.1), torch 2.13.0, triton 3.7.1, 2026-12-01, "
        "commit 012345678."
    )
    record["kernels"] = "0" * 64
    assert not records.is_fresh(record)
    assert records.provenance(record).endswith("The kernels have changed since.")


def test_the_header_of_a_new_record_is_that_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="expected a CUDA GPU, found none"):
        records.environment("x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(records, "_output", lambda *command: " ".join(command))
    header = records.environment("chunk_forward")
    assert header["driver"].startswith("nvidia-smi --query-gpu=driver_version")
    assert header["commit"].endswith("rev-parse HEAD") and header["torch"] == torch.__version__
    assert records.environment("x", commit="abc")["commit"] == "abc"
    assert records.is_fresh(records.validate({**good(), **header}))


def test_the_committed_records_are_valid():
    """All of them: a record that is refused must not lie in the repository."""
    for path in sorted(records.RESULTS.glob("*/*.json")):
        assert records.load(path.stem, gpu=path.parent.name)["name"] == path.stem


# -- what the README says of speed -------------------------------------------------------------


def of_fla(name, impl, key="median"):
    """{case: our number over fla's}, of the cases that both were timed in."""
    record = records.load(name)
    ours = {row["case"]: row[key] for row in records.rows(record, impl=f"kda_edu {impl}")}
    return {
        row["case"]: ours[row["case"]] / row[key]
        for row in record["rows"]
        if row["impl"].startswith("fla") and row["case"] in ours
    }


@pytest.mark.parametrize(
    "name, impl, cases, time, memory",
    [
        ("forward", "chunk_kda", 5, (0.38, 0.5), (0.4, 0.5)),
        ("training", "chunk_kda, stored", 2, (0.75, 0.85), (0.65, 0.75)),
        ("training", "chunk_kda", 2, (0.85, 1.05), (0.55, 0.65)),
        ("decode", "fused_recurrent_kda_update", 4, (0.75, 1.035), None),
    ],
)
def test_the_readme_compares_as_the_records_do(name, impl, cases, time, memory):
    for key, limits in (("median", time), ("memory", memory)):
        if limits is not None:
            ratios = of_fla(name, impl, key)
            assert len(ratios) == cases, ratios
            assert all(limits[0] < ratio < limits[1] for ratio in ratios.values()), ratios


def test_the_readme_says_where_the_peer_decodes_faster():
    ratios = of_fla("decode", "fused_recurrent_kda_update")
    assert {case: ratio > 1 for case, ratio in ratios.items()} == {
        "B1 T1 H32": False,
        "B8 T1 H32": False,
        "B64 T1 H32": True,
        "B256 T1 H32": True,
    }

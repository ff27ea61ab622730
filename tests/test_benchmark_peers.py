"""benchmarks/run.py: what is handed to a peer that cannot be installed here."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from kda_edu import reference
from kda_edu.teach import make_inputs

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "run.py"


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("run_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fwd(
    q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound,
    initial_state=None, final_state=None, cu_seqlens=None,
):  # fmt: skip
    """FlashKDA's interface: A_log [H], dt_bias [H, K], states [N, H, V, K], outputs in place."""
    H, K, V = *q.shape[2:], v.shape[3]
    N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    assert A_log.shape == (H,) and dt_bias.shape == (H, K)
    assert initial_state.shape == final_state.shape == (N, H, V, K)
    assert all(x.is_contiguous() for x in (initial_state, final_state, out))
    o, last = reference.recurrent_kda(
        q, k, v, g, beta, scale=scale, A_log=A_log, dt_bias=dt_bias.flatten(),
        lower_bound=lower_bound, initial_state=initial_state, state_v_first=True,
        output_final_state=True, cu_seqlens=cu_seqlens, use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    out.copy_(o)
    final_state.copy_(last)


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 3, 9])])
def test_flash_kda_gets_what_it_expects(run, cu_seqlens, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_kda", types.SimpleNamespace(fwd=fwd))
    x = make_inputs(
        B=1, T=9, H=2, HV=2, K=6, V=5, dtype=torch.float64, cu_seqlens=cu_seqlens
    )._asdict()
    options = dict(
        initial_state=x.pop("initial_state"), cu_seqlens=x.pop("cu_seqlens"), lower_bound=-5.0,
        A_log=torch.randn(2).double(), dt_bias=torch.randn(12).double(), output_final_state=True,
        use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    want = reference.recurrent_kda(**x, **options)
    for got, right in zip(run.flash_kda_fwd(*x.values(), **options), want, strict=True):
        assert torch.equal(got, right)
    with pytest.raises(ValueError, match="lower_bound: FlashKDA expects one, got None"):
        run.flash_kda_fwd(*x.values(), **options | dict(lower_bound=None))


def test_only_what_is_installed_is_timed(run):
    peers = run.RECORDS["forward"][1]
    assert ("FlashKDA fwd" in peers) == (importlib.util.find_spec("flash_kda") is not None)
    assert list(peers)[:3] == [
        "kda_edu chunk_kda",
        "kda_edu chunk_kda, six steps",
        "fla chunk_kda",
    ]

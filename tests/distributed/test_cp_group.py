"""`chunk_kda(cp_group=...)` is `context_parallel_kda`; the folder of kernels does not import it."""

import pytest
import torch
import torch.distributed as dist
import triton

import kda_edu.distributed
from kda_edu import chunk_kda
from kda_edu.kernels import chunk
from kda_edu.teach.inputs import make_inputs


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_of_one_gives_the_same(group):
    if not triton.knobs.runtime.interpret:
        pytest.skip("gloo exchanges tensors of a CPU, whose kernels need TRITON_INTERPRET=1")
    x = make_inputs(B=1, T=20, H=1, HV=2, K=16, V=16)
    options = dict(initial_state=x.initial_state, output_final_state=True, chunk_size=16)
    for got, want in zip(
        chunk_kda(*x[:5], **options, cp_group=group), chunk_kda(*x[:5], **options), strict=True
    ):
        assert torch.equal(got, want)
    with pytest.raises(ValueError, match="return_intermediate_states: expected False"):
        chunk_kda(*x[:5], cp_group=group, return_intermediate_states=True)


def test_without_the_part_for_many_gpus_it_says_so(monkeypatch):
    assert chunk.context_parallel is kda_edu.distributed.context_parallel_kda
    monkeypatch.setattr(chunk, "context_parallel", None)
    x = make_inputs(B=1, T=1, H=1, K=1, V=1)
    with pytest.raises(ImportError, match="cp_group: expected `import kda_edu.distributed`"):
        chunk_kda(*x[:5], cp_group=object())

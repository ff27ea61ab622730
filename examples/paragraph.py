"""A paragraph of text through both kernels, each beside the float64 oracle.

TRITON_INTERPRET=1 python examples/paragraph.py       with no GPU (about ten seconds)
python examples/paragraph.py                          with one
"""

import torch

from kda_edu import chunk_kda, fused_recurrent_kda, reference
from kda_edu.teach import budget_for, rms_error

TEXT = """A matrix can be a memory. To write, add the outer product of a key and a value; to read,
multiply by a query. The delta rule erases before it writes, and a gate lets every channel forget
at its own pace."""
H, K, V = 1, 16, 8

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
letters = torch.tensor(list(TEXT.encode()))
table = torch.randn(256, 64)  # one vector per byte, fixed and random


def project(*shape):
    """The text times a random matrix: [1, T, H, ...]."""
    return ((table / 8) @ torch.randn(64, H, *shape).flatten(1))[letters].view(1, -1, H, *shape)


x = {name: project(*shape) for name, shape in dict(q=(K,), k=(K,), v=(V,), g=(K,), beta=()).items()}
options = dict(A_log=torch.full((H,), -2.0), use_gate_in_kernel=True,
               use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)  # fmt: skip
wide = {n: t.double() if torch.is_tensor(t) else t for n, t in (x | options).items()}
o, state = reference.recurrent_kda(**wide, output_final_state=True)
here = {n: t.to(device) if torch.is_tensor(t) else t for n, t in (x | options).items()}
print(f"{len(letters)} bytes of text end as a state of {K} x {V} numbers.")
for kernel in (chunk_kda, fused_recurrent_kda):
    got = kernel(**here, output_final_state=True)
    errors = [rms_error(a.cpu(), b) for a, b in zip(got, (o, state), strict=True)]
    print(f"{kernel.__name__:20} error of o {errors[0]:.0e}, of the state {errors[1]:.0e}")
    assert max(errors) < budget_for(torch.float32)
print("Notice: one kernel takes 64 bytes at a time, the other one, and both give the same numbers.")

"""KDA kernels in Triton. Copy this folder: it imports torch, triton and itself, nothing else.

One file per step, named by what it computes. Where Triton is not installed (macOS, Windows) the
folder still imports, and calling a kernel says what is missing.
"""

import importlib

# Every public function, by the file that holds it.
_FILES = {
    "backward": ("chunk_kda_bwd",),
    "chunk": ("chunk_kda",),
    "cumsum": ("chunk_local_cumsum", "kda_gate_chunk_cumsum"),
    "forward": ("chunk_kda_fwd",),
    "gate": ("kda_gate_fwd",),
    "l2norm": ("l2norm_fwd",),
    "intra": ("chunk_kda_scaled_dot_kkt_fwd",),
    "output": ("chunk_gla_fwd_o_gk",),
    "pool": ("fused_recurrent_kda_update",),
    "recurrent": ("fused_recurrent_kda", "fused_recurrent_kda_fwd"),
    "solve_tril": ("solve_tril_kda",),
    "state": ("chunk_gated_delta_rule_fwd_h_kda",),
    "wy": ("recompute_w_u_fwd",),
}
_OLDEST_TRITON = (3, 6)

__all__ = [name for names in _FILES.values() for name in names]


def _what_is_missing():
    """Why the kernels cannot be loaded here, or None."""
    wanted = "Triton >= {}.{}".format(*_OLDEST_TRITON)
    try:
        import triton
    except ImportError:
        return f"{wanted}, which is not installed here (it exists for Linux)"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return f"{wanted}; {triton.__version__} is installed" if version < _OLDEST_TRITON else None


def _absent(name, reason):
    def raise_import_error(*args, **kwargs):
        raise ImportError(f"{name} is a Triton kernel and needs {reason}. {_INSTEAD}")

    raise_import_error.__name__ = name
    return raise_import_error


_INSTEAD = "The same mathematics in plain PyTorch, for any device, is in kda_edu.reference."
_missing = _what_is_missing()

if _missing is None:
    import triton

    if triton.knobs.runtime.interpret:
        from . import _interpreter  # noqa: F401  (bfloat16 in the interpreter)

for _file, _names in _FILES.items():
    for _name in _names:
        if _missing is None:
            globals()[_name] = getattr(importlib.import_module(f".{_file}", __name__), _name)
        else:
            globals()[_name] = _absent(_name, _missing)

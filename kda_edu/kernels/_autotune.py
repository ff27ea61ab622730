"""`triton.autotune` that also works in the interpreter, where nothing can be timed.

With KDA_AUTOTUNE=0 in the environment, before the import, nothing is timed anywhere: each kernel
takes the first of its configurations, so every process gives the same bits.
"""

import os

import triton


def autotune(configs, key, **options):
    """Like `triton.autotune`; interpreting, or with KDA_AUTOTUNE=0, it takes the first entry.

    Order of decorators: autotune above heuristics above jit. The kernel's attribute
    `every_config` lists all configurations in each mode, for tests that run each of them.
    """
    every_config = list(configs)
    asked = os.environ.get("KDA_AUTOTUNE", "1")
    if asked not in ("0", "1"):
        raise ValueError(f"KDA_AUTOTUNE: expected 0 or 1, got {asked!r}")
    if triton.knobs.runtime.interpret:
        options["do_bench"] = lambda kernel, quantiles=None, **_: [0.0] * 3
    if triton.knobs.runtime.interpret or asked == "0":
        configs = every_config[:1]
    tune = triton.autotune(configs=configs, key=key, **options)

    def decorate(function):
        kernel = tune(function)
        kernel.every_config = every_config
        return kernel

    return decorate

"""`triton.autotune` that also works in the interpreter, where nothing can be timed."""

import triton


def autotune(configs, key, **options):
    """Like `triton.autotune`; interpreting, it takes the first configuration.

    Order of decorators: autotune above heuristics above jit.
    """
    if triton.knobs.runtime.interpret:
        configs = configs[:1]
        options["do_bench"] = lambda kernel, quantiles=None, **_: [0.0] * 3
    return triton.autotune(configs=configs, key=key, **options)

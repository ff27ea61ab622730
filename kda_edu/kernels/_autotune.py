"""`triton.autotune` that also works in the interpreter, where nothing can be timed."""

import triton


def autotune(configs, key, **options):
    """Like `triton.autotune`; interpreting, it takes the first configuration.

    Order of decorators: autotune above heuristics above jit. The kernel's attribute
    `every_config` lists all configurations in both modes, for tests that run each of them.
    """
    every_config = list(configs)
    if triton.knobs.runtime.interpret:
        configs = configs[:1]
        options["do_bench"] = lambda kernel, quantiles=None, **_: [0.0] * 3
    tune = triton.autotune(configs=configs, key=key, **options)

    def decorate(function):
        kernel = tune(function)
        kernel.every_config = every_config
        return kernel

    return decorate

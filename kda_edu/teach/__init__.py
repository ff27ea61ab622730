"""What the chapters use: one error metric, hard inputs, exercises, pictures, measured numbers.

Importing this imports torch and the standard library only; matplotlib and IPython are imported
by the first function that draws or shows.
"""

from . import records
from .check import BUDGETS, CheckFailed, budget_for, check, max_error, rms_error
from .compiled import instructions, ptx
from .device import setup
from .earlier import from_chapter
from .exercises import check_exercise, exercise, solution, stub
from .figures import (
    animate_states,
    error_map,
    figure,
    filmstrip,
    heatmaps,
    show,
    state_heatmap,
    style,
)
from .images import Picture
from .inputs import Inputs, make_inputs
from .palette import COLOURS, colour

__all__ = [
    "BUDGETS",
    "COLOURS",
    "CheckFailed",
    "Inputs",
    "Picture",
    "animate_states",
    "budget_for",
    "check",
    "check_exercise",
    "colour",
    "error_map",
    "exercise",
    "figure",
    "filmstrip",
    "from_chapter",
    "heatmaps",
    "instructions",
    "make_inputs",
    "max_error",
    "ptx",
    "records",
    "rms_error",
    "setup",
    "show",
    "solution",
    "state_heatmap",
    "stub",
    "style",
]

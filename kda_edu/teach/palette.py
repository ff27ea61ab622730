"""One colour for each symbol, the same in every picture of the book.

Every colour has a contrast of at least 3:1 on a white page and on the dark page (#121212), as
WCAG 2.2 asks of graphics (success criterion 1.4.11), so one picture serves both. Under the
three common colour-vision deficiencies, simulated after Machado et al. 2009, any two stay at
least 15 CIELAB units apart. Colour is never the only cue: figures also label what they show.
"""

COLOURS = {
    "q": "#6090fc",  # query: blue
    "k": "#d87800",  # key: orange
    "v": "#00a860",  # value: green
    "g": "#0c6c90",  # decay: petrol
    "beta": "#f018b4",  # write strength: pink
    "S": "#9000fc",  # state, the memory: violet
    "o": "#786018",  # output: brown
    "error": "#fc3c48",  # what is wrong: red
    "ink": "#787878",  # text, axes, whatever is no symbol
}

# Other names for the same things.
ALIASES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "decay": "g",
    "gate": "g",
    "alpha": "g",
    "write_strength": "beta",
    "state": "S",
    "memory": "S",
    "output": "o",
    "neutral": "ink",
}

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#121212"


def colour(symbol):
    """The colour of a symbol or of its name in words, as "#rrggbb".

    Raises ValueError for a symbol that has none.
    """
    name = ALIASES.get(symbol, symbol)
    if name not in COLOURS:
        known = ", ".join([*COLOURS, *ALIASES])
        raise ValueError(f"symbol: expected one of {known}, got {symbol!r}")
    return COLOURS[name]


def luminance(colour):
    """Relative luminance of "#rrggbb", 0 to 1 (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)

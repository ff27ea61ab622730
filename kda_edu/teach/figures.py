"""Pictures of states, matrices and errors, in the book's colours and with alternative text.

The one right way for a chapter's own picture:

    fig, ax = figure()                      # styled, transparent
    ax.plot(t, recall, color=colour("S"), label="state")
    show(fig, alt="Recall falls from 1 to 0.2 as pairs are stored.", caption="...")

Never `plt.show()`: it leaves no alternative text. Every helper below returns a `Picture`, which
is shown when it is the last value of a cell (or by `display`). matplotlib is imported when the
first picture is drawn.
"""

import io

import torch

from .images import DENSITY, MOST_BYTES, Picture, encode, encode_animation
from .palette import COLOURS, colour

DPI = 96 * DENSITY  # a page has 96 pixels to the inch, so 10 points are 13 pixels
MOST_FRAMES = 24
LINES = ("S", "k", "v", "q", "beta", "g", "o")  # the order of colours of unnamed lines


def style():
    """Use the book's matplotlib settings from here on. `figure` calls it."""
    import matplotlib

    ink = COLOURS["ink"]
    settings = {
        "figure.dpi": 96,
        "savefig.dpi": DPI,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "axes.edgecolor": ink,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": matplotlib.cycler(color=[COLOURS[name] for name in LINES]),
        "text.color": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": ink,
        "grid.alpha": 0.3,
        "lines.linewidth": 2,
        "legend.frameon": False,
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "figure.constrained_layout.use": True,
    }
    matplotlib.rcParams.update(settings)


def figure(rows=1, columns=1, size=None, **options):
    """(fig, axes) like `plt.subplots`, in the book's style and outside pyplot.

    size is in inches, default 4.5 x 2.8 for each panel, up to 7.5 wide. Show it with `show`.
    The style stays on, for what is drawn into the axes afterwards.
    """
    from matplotlib.figure import Figure

    style()
    fig = Figure(figsize=size or (min(4.5 * columns, 7.5), 2.8 * rows))
    return fig, fig.subplots(rows, columns, **options)


def show(fig, alt, caption=None):
    """A Picture of a matplotlib figure. Close nothing: figures made by `figure` are not kept."""
    return Picture(encode(_render(fig)), alt, caption)


def state_heatmap(S, title="state S", alt=None, caption=None, scale=None, symbol="S"):
    """One matrix, e.g. a state [K, V]: rows are key channels, columns value channels.

    Blue is negative, white zero, red positive; `scale` is the value of the darkest colour,
    default the largest absolute value. `alt` defaults to a sentence with shape and title.
    """
    return heatmaps({title: S}, alt=alt, caption=caption, scale=scale, symbols=[symbol])


def heatmaps(matrices, alt=None, caption=None, scale=None, symbols=None, labels=None):
    """Several matrices side by side with one shared diverging scale around zero.

    matrices  dict title -> matrix [rows, columns], or a list.
    symbols   one symbol of the palette for each, which colours its frame and title; default
              taken from a title that is a symbol ("S", "k"), else ink.
    labels    (row label, column label) for all, e.g. ("key channel", "value channel").
    """
    named = _named(matrices)
    values = {title: _matrix(title, matrix) for title, matrix in named.items()}
    scale = scale or max(_peak(matrix) for matrix in values.values())
    symbols = symbols or [title if title in COLOURS else "ink" for title in named]
    fig, axes = figure(1, len(values), size=(min(2.6 * len(values) + 0.8, 7.5), 2.6), squeeze=False)
    for ax, (title, matrix), symbol in zip(axes[0], values.items(), symbols, strict=True):
        drawn = _draw(ax, matrix, scale, title, symbol, labels)
    bar = fig.colorbar(drawn, ax=list(axes[0]), shrink=0.8)
    bar.outline.set_edgecolor(COLOURS["ink"])
    alt = alt or f"{_count(values)} with a shared colour scale around zero: {_shapes(values)}."
    return show(fig, alt, caption)


def error_map(got, want, alt=None, caption=None, names=("want", "got")):
    """Wanted, got, and log10 of their difference, side by side. Matrices [T, channels]."""
    want, got = _matrix("want", want), _matrix("got", got)
    if want.shape != got.shape:
        raise ValueError(f"got has shape {tuple(got.shape)}, want has shape {tuple(want.shape)}")
    scale = _peak(want)
    gap = (got - want).abs().clamp_min(1e-17).log10()
    fig, axes = figure(1, 3, size=(7.5, 2.6))
    _draw(axes[0], want, scale, names[0], "ink", None)
    values = _draw(axes[1], got, scale, names[1], "ink", None)
    errors = axes[2].imshow(gap.numpy(), cmap="magma", aspect="auto", vmin=-17, vmax=1)
    _frame(axes[2], "log10 |difference|", "error")
    for drawn, where in ((values, list(axes[:2])), (errors, axes[2])):
        fig.colorbar(drawn, ax=where, shrink=0.8).outline.set_edgecolor(COLOURS["ink"])
    alt = alt or (
        f"Three heatmaps of shape {_size(want)}: the wanted values, the values got, and the "
        "logarithm of their difference."
    )
    return show(fig, alt, caption)


def filmstrip(states, tokens=None, alt=None, caption=None, scale=None, symbol="S"):
    """The state after some tokens, side by side. states [T, K, V]; tokens default to six."""
    states = _stack(states)
    tokens = _spread(len(states), 6) if tokens is None else list(tokens)
    scale = scale or _peak(states)
    fig, axes = figure(1, len(tokens), size=(7.5, 1.9), squeeze=False)
    for ax, token in zip(axes[0], tokens, strict=True):
        _draw(ax, states[token], scale, f"token {token}", symbol, None)
    alt = alt or (
        f"The {_size(states[0])} state matrix after tokens "
        f"{', '.join(str(token) for token in tokens)}."
    )
    return show(fig, alt, caption)


def animate_states(
    states,
    path=None,
    alt=None,
    caption=None,
    titles=None,
    seconds=0.5,
    scale=None,
    symbol="S",
    labels=("key channel", "value channel"),
):
    """The state matrix over time as an animated PNG, which every browser plays.

    states   [T, K, V], or a list of matrices. At most 24 frames are drawn: longer runs are
             thinned evenly, first and last token kept; so are films above 200 kB.
    path     also write the file: .png, or .gif for readers that want that format.
    titles   a line above each state, default "after token t".
    seconds  for each frame; the last one is held longer.

    A picture that moves is tiring beside text: place a `filmstrip` near it if the reader has
    to compare steps.
    """
    states = _stack(states)
    titles = titles or [f"after token {token}" for token in range(len(states))]
    alt = alt or f"Animation of the {_size(states[0])} state matrix over {len(states)} tokens."
    chosen = _spread(len(states), MOST_FRAMES)
    images = _film(
        states[chosen], [titles[i] for i in chosen], scale or _peak(states), symbol, labels
    )
    data = encode_animation(images, int(1000 * seconds))
    while len(data) > MOST_BYTES and len(images) > 4:
        fewer = max(4, int(0.95 * len(images) * MOST_BYTES / len(data)))
        images = [images[i] for i in _spread(len(images), fewer)]
        data = encode_animation(images, int(1000 * seconds))
    picture = Picture(data, alt, caption)
    if path is not None:
        _write_animation(picture, images, str(path), seconds)
    return picture


def _film(states, titles, scale, symbol, labels):
    """One image for each state. Only the values and the title change, so nothing jumps."""
    fig, ax = figure(1, 1, size=(3.4, 2.8))
    drawn = _draw(ax, states[0], scale, titles[0], symbol, labels)
    fig.colorbar(drawn, ax=ax).outline.set_edgecolor(COLOURS["ink"])
    images = []
    for state, title in zip(states, titles, strict=True):
        drawn.set_data(state.numpy())
        ax.title.set_text(title)
        images.append(_render(fig))
        fig.set_layout_engine("none")  # the first frame's layout holds for all
    return images


def _spread(length, most):
    """At most `most` places from 0 to length - 1, even, with the first and the last."""
    count = min(length, most)
    return [round(i * (length - 1) / max(count - 1, 1)) for i in range(count)]


def _write_animation(picture, images, path, seconds):
    if path.endswith(".png"):
        picture.save(path)
    elif path.endswith(".gif"):
        first, *rest = images
        first.save(
            path,
            save_all=True,
            append_images=rest,
            duration=int(1000 * seconds),
            loop=0,
            disposal=2,
        )
    else:
        raise ValueError(f"path: expected a name ending in .png or .gif, got {path!r}")


def _render(fig):
    """The figure as a PIL RGBA image, at DENSITY times the size it is shown."""
    from PIL import Image

    buffer = io.BytesIO()
    fig.savefig(buffer, format="rgba", dpi=DPI, transparent=True)
    size = [int(inches * DPI) for inches in fig.get_size_inches()]
    return Image.frombytes("RGBA", size, buffer.getvalue())


def _draw(ax, matrix, scale, title, symbol, labels):
    options = dict(cmap="RdBu_r", aspect="auto", interpolation="nearest")
    drawn = ax.imshow(matrix.numpy(), vmin=-scale, vmax=scale, **options)
    _frame(ax, title, symbol)
    if labels:
        ax.set_xlabel(labels[1])
    if labels and ax.get_subplotspec().is_first_col():
        ax.set_ylabel(labels[0])
    return drawn


def _frame(ax, title, symbol):
    shade = colour(symbol)
    ax.set_title(title, color=shade)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(True)
        spine.set_color(shade)
        spine.set_linewidth(1.5)


def _named(matrices):
    if isinstance(matrices, dict):
        return matrices
    if isinstance(matrices, torch.Tensor):
        return {"": matrices}
    return {str(i): matrix for i, matrix in enumerate(matrices)}


def _matrix(name, matrix):
    matrix = torch.as_tensor(matrix).detach().cpu().double()
    if matrix.ndim != 2:
        raise ValueError(f"{name}: expected a matrix, got shape {tuple(matrix.shape)}")
    return matrix


def _stack(states):
    if not isinstance(states, torch.Tensor):
        states = torch.stack([torch.as_tensor(state) for state in states])
    states = states.detach().cpu().double()
    if states.ndim != 3 or not len(states):
        raise ValueError(f"states: expected shape [T, K, V] with T > 0, got {tuple(states.shape)}")
    return states


def _peak(values):
    """The largest finite absolute value, 1 where all is zero."""
    finite = values[values.isfinite()].abs()
    return (finite.max().item() if finite.numel() else 0.0) or 1.0


def _size(matrix):
    return f"{matrix.shape[0]} by {matrix.shape[1]}"


def _count(values):
    return "Heatmap" if len(values) == 1 else f"{len(values)} heatmaps"


def _shapes(values):
    return ", ".join(f"{title or 'a matrix'} ({_size(matrix)})" for title, matrix in values.items())

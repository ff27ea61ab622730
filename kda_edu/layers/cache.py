"""What a model remembers between calls of `generate`: one entry per layer."""


class Cache:
    """States by layer, and the number of tokens seen.

    A KDA layer keeps dict(convolution=(q, k, v), state=S): the last inputs of its convolutions
    and its memory, of constant size. A softmax layer keeps dict(keys=..., values=...), which
    grows with every token.
    """

    def __init__(self):
        self.layers = {}
        self.tokens = 0

    def get(self, layer_idx):
        """What the layer stored last, or None."""
        return self.layers.get(layer_idx)

    def update(self, layer_idx, **state):
        self.layers[layer_idx] = state

    def bytes(self):
        """Memory that the states take."""

        def size(x):
            return sum(map(size, x)) if isinstance(x, tuple) else x.numel() * x.element_size()

        return sum(size(x) for state in self.layers.values() for x in state.values())

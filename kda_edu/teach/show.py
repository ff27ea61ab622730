"""What a chapter shows: HTML for a notebook and the book, plain text for a terminal."""


class Shown:
    """An object that a notebook displays as HTML and a terminal prints as text."""

    def __init__(self, page, text):
        self.page, self.text = page, text

    def _repr_html_(self):
        return self.page

    def __repr__(self):
        return self.text

"""A picture with alternative text, as a notebook, the book and a strict comparison want it.

A notebook shows the PNG and keeps the alternative text in the metadata of the output, where
Jupyter looks for it; `kda_edu.teach.sphinx_figures` puts it into the book's page. The plain
text of the output is the alternative text, so a comparison of outputs compares that, and
leaves the pixels alone.
"""

import base64
import io
import struct

MOST_BYTES = 200_000
DENSITY = 1.5  # pixels drawn for one pixel of the page: sharp lines on good screens


class Picture:
    """PNG bytes (still or animated), alternative text and an optional caption.

    alt      what the picture shows, in a sentence, for those who do not see it. Required.
    caption  one sentence shown below the picture; knows `code`, **bold** and $formula$.

    Raises ValueError for missing alternative text, bytes that are no PNG, or more than 200 kB.
    """

    def __init__(self, data, alt, caption=None):
        if not isinstance(alt, str) or len(alt.split()) < 3:
            raise ValueError(f"alt: expected a sentence that says what is shown, got {alt!r}")
        if not data.startswith(b"\x89PNG\r\n\x1a\n"):
            raise ValueError(f"data: expected a PNG, got bytes that begin {data[:8]!r}")
        if len(data) > MOST_BYTES:
            raise ValueError(
                f"data: expected at most {MOST_BYTES} bytes, got {len(data)}: use a smaller "
                "figure, fewer colours or fewer frames"
            )
        self.data, self.alt, self.caption = data, " ".join(alt.split()), caption

    @property
    def size(self):
        """Width and height in pixels."""
        return struct.unpack(">II", self.data[16:24])

    def save(self, path):
        """Write the PNG to a file; returns the path."""
        with open(path, "wb") as file:
            file.write(self.data)
        return path

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {
            "image/png": base64.b64encode(self.data).decode("ascii"),
            "text/plain": repr(self),
        }
        metadata = {"alt": self.alt, "width": round(self.size[0] / DENSITY)}
        if self.caption:
            metadata["caption"] = self.caption
        return data, {"image/png": metadata}

    def __repr__(self):
        caption = f"\n{self.caption}" if self.caption else ""
        return f"[picture: {self.alt}]{caption}"


def encode(image):
    """PNG bytes of a PIL RGBA image; the same pixels give the same bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def encode_animation(images, milliseconds, hold=1500):
    """Animated PNG bytes from PIL RGBA images of one size; the last frame is held longer.

    A reader that knows no animation, and the PDF, show the first frame.
    """
    first, *rest = images
    buffer = io.BytesIO()
    first.save(
        buffer,
        format="PNG",
        save_all=True,
        append_images=rest,
        duration=[milliseconds] * len(rest) + [hold],
        loop=0,
        disposal=0,
        blend=0,
        optimize=True,
    )
    return buffer.getvalue()

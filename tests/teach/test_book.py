"""What the kit puts into a notebook survives the way into the book and into nbval."""

import hashlib
import json
import re
from configparser import ConfigParser
from pathlib import Path

import nbformat
import torch
from sphinx.testing.util import SphinxTestApp

from kda_edu.teach import check, figure, setup, show
from kda_edu.teach.exercises import exercise_names, get
from kda_edu.teach.exercises._show import exercise

ROOT = Path(__file__).resolve().parents[2]


def picture(value, caption=None, alt="A line that rises from zero."):
    fig, ax = figure(size=(2, 1))
    ax.plot([0, value])
    return show(fig, alt=alt, caption=caption)


def output(data, metadata):
    return nbformat.v4.new_output("display_data", data=data, metadata=metadata)


def notebook(*outputs):
    cells = [nbformat.v4.new_markdown_cell("# Title\n\n$x^2$")]
    for place, made in enumerate(outputs):
        cells.append(nbformat.v4.new_code_cell(f"cell {place}", outputs=[made]))
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec})


def build(folder, made):
    """The HTML of a one-page book and what Sphinx warned of."""
    nbformat.write(made, folder / "index.ipynb")
    (folder / "conf.py").write_text(
        "extensions = ['myst_nb', 'kda_edu.teach.sphinx_figures']\n"
        "nb_execution_mode = 'off'\nnumfig = True\n"
    )
    app = SphinxTestApp(srcdir=folder, builddir=folder / "_build", freshenv=True)
    try:
        app.build()
        return (Path(app.outdir) / "index.html").read_text(), app.warning.getvalue(), app
    finally:
        app.cleanup()


def test_alternative_text_and_captions_reach_the_page(tmp_path):
    plain = picture(1)._repr_mimebundle_()
    titled = picture(2, caption="The state $S_t$ of `f`, **big**.")._repr_mimebundle_()
    page, warnings, app = build(tmp_path, notebook(output(*plain), output(*titled)))
    assert warnings == ""
    images = re.findall(r"<img[^>]*>", page)
    assert len(images) == 2
    assert all('alt="A line that rises from zero."' in image for image in images)
    assert all("dark-light" in image and "width: 192px" in image for image in images)
    digest = hashlib.sha256(picture(2).data).hexdigest()
    assert digest in images[1]
    caption = page[page.index("<figcaption>") : page.index("</figcaption>")]
    assert "Fig. 1" in caption and "S_t" in caption and "<strong>big</strong>" in caption
    assert page.count("<figcaption>") == 1
    assert (Path(app.outdir) / "_static/kda_teach.css").read_text().count("dark-light") == 2
    assert "kda_teach.css" in page


def test_a_picture_without_alternative_text_is_a_warning(tmp_path):
    data, _ = picture(3)._repr_mimebundle_()
    page, warnings, _ = build(tmp_path, notebook(output(data, {})))
    assert "a picture has no alternative text" in warnings


def test_an_exercise_reaches_the_page(tmp_path):
    shown = exercise(exercise_names()[0])
    data = {"text/html": shown._repr_html_(), "text/plain": repr(shown)}
    page, warnings, _ = build(tmp_path, notebook(output(data, {})))
    assert warnings == ""
    assert '<div class="kda-card kda-exercise"' in page and "<summary" in page
    assert get(exercise_names()[0]).title in page


def sanitize(text):
    """What nbval compares: the rules of tools/nbval.cfg, in their order."""
    rules = ConfigParser(interpolation=None)
    rules.read(ROOT / "tools" / "nbval.cfg")
    for name in rules.sections():
        text = re.sub(rules[name]["regex"], rules[name]["replace"], text)
    return text


def test_another_processor_prints_the_same_line(capsys):
    """Its round-off differs: in size, and in where it is largest."""
    want = torch.randn(70, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lines = []
    for error, token in ((2.9e-13, 3), (3.1e-13, 66)):
        got = want * (1 + error)
        got[token, 2] += 1e-14
        check(got, want, "o")
        lines.append(capsys.readouterr().out)
    assert lines[0] != lines[1]
    assert sanitize(lines[0]) == sanitize(lines[1])
    assert sanitize(lines[0]).startswith("ok  o  error ")


def test_setup_prints_one_stable_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert setup(seed=1) == torch.device("cpu")
    first = torch.rand(3)
    line = "Running on the CPU: kernels run in Triton's interpreter.\n"
    assert capsys.readouterr().out == line
    setup(seed=1)
    assert torch.equal(torch.rand(3), first)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    capsys.readouterr()
    setup(kernels=True)
    assert (
        capsys.readouterr().out
        == line + "It is off: set TRITON_INTERPRET=1 before Python starts.\n"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    setup(kernels=True)
    assert capsys.readouterr().out == line


def test_the_committed_notebooks_hold_no_picture_without_alternative_text():
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for made in cell.get("outputs", []):
                if "image/png" in made.get("data", {}):
                    alt = made["metadata"].get("image/png", {}).get("alt")
                    assert alt, f"{path.name}: {''.join(cell['source'])}"

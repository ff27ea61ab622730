"""The directive `api`: what a package offers, from its docstrings.

    ```{api} kda_edu.kernels
    :first: chunk_kda, fused_recurrent_kda
    ```

The files are parsed, not run: no GPU is needed, nor a Triton that can be imported. The docstrings
are plain text with `code`, "Args:", "Returns:", "Raises:" and indented formulas; they are not
reStructuredText, so autodoc would misread their backticks and stars.
"""

import ast
import importlib
import re
import textwrap
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

HEADINGS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Raises": "Raises",
}
ITEM = r"([\w*.]+(?:(?:, | \.\.\. )[\w*.]+)*): "
WIDTH = 78  # characters in a line of a signature


def setup(app):
    app.add_directive("api", Api)
    return {"parallel_read_safe": True}


class Api(SphinxDirective):
    """A section for each public function and class of a module or package."""

    required_arguments = 1
    option_spec = {"first": directives.unchanged}  # what a reader looks for, before the rest

    def run(self):
        package = importlib.import_module(self.arguments[0])
        made = []
        for path in files_of(package):
            self.env.note_dependency(str(path))
        first = self.options.get("first", "").replace(",", " ").split()
        for name, node in sorted(public(package), key=lambda found: found[0] not in first):
            anchor = nodes.make_id(f"api-{package.__name__}-{name}")
            section = nodes.section("", ids=[anchor], names=[f"{package.__name__}.{name}"])
            section += nodes.title("", "", nodes.literal(name, name))
            section += nodes.literal_block(text := signature(node), text, language="python")
            section += described(ast.get_docstring(node) or "")
            section += methods(node)
            made.append(section)
        return made


def files_of(package):
    """The Python files of a package, or the file of a module."""
    file = Path(package.__file__)
    return sorted(file.parent.glob("*.py")) if file.name == "__init__.py" else [file]


def public(package):
    """(name, syntax tree) of each public function and class, in the order of __all__.

    A module without __all__ offers all its functions whose name has no leading underscore.
    """
    found = {}
    for path in files_of(package):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.setdefault(node.name, node)
    names = getattr(package, "__all__", [name for name in found if not name.startswith("_")])
    if not any(name in found for name in names):
        raise ExtensionError(f"api: {package.__name__} offers nothing")
    return [(name, found[name]) for name in names if name in found]


def signature(node):
    """How it is called: the name, the arguments and their defaults, broken into short lines."""
    arguments = arguments_of(node)
    whole = f"{node.name}({', '.join(arguments)})"
    if len(whole) <= WIDTH:
        return whole
    lines = textwrap.wrap(
        ", ".join(a.replace(" ", "\0") for a in arguments), WIDTH - 4, break_long_words=False
    )
    return f"{node.name}(\n" + textwrap.indent("\n".join(lines), "    ").replace("\0", " ") + "\n)"


def arguments_of(node):
    """The arguments of a function, of a class's __init__, or a data class's fields."""
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if getattr(n, "name", None) == "__init__"]
        if not inits:
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            return [f.target.id + (f"={ast.unparse(f.value)}" if f.value else "") for f in fields]
        node = inits[0]
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    made = [_with_default(x, d) for x, d in zip(positional, defaults, strict=True)]
    made = made[1:] if made[:1] == ["self"] else made
    if a.vararg:
        made.append(f"*{a.vararg.arg}")
    elif a.kwonlyargs:
        made.append("*")
    made += [_with_default(x, d) for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return made + ([f"**{a.kwarg.arg}"] if a.kwarg else [])


def _with_default(argument, default):
    return argument.arg + (f"={ast.unparse(default)}" if default is not None else "")


def methods(node):
    """A class's public methods that have a docstring, as a definition list."""
    if not isinstance(node, ast.ClassDef):
        return []
    items = []
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            if ast.get_docstring(method):
                call = f".{method.name}({', '.join(arguments_of(method))})"
                items.append(definition(call, described(ast.get_docstring(method))))
    return [nodes.definition_list("", *items)] if items else []


# -- a docstring -------------------------------------------------------------------------------


def described(text):
    """The nodes of a docstring."""
    made, heading, block = [], None, []

    def close():
        body = textwrap.dedent("\n".join(block))
        if heading:
            made.append(nodes.rubric("", HEADINGS[heading]))
            made.extend(fields(body))
        else:
            made.extend(paragraphs(body))

    for line in text.splitlines():
        match = re.fullmatch(r"(\w+):", line)
        if match and match[1] in HEADINGS:
            close()
            heading, block = match[1], []
        elif heading and line and not line.startswith(" "):
            close()
            heading, block = None, [line]
        else:
            block.append(line)
    close()
    return made


def paragraphs(text):
    """Paragraphs; one that is indented or set in columns keeps its layout."""
    made = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if re.search(r"^ |\S {3,}\S", part, re.M):
            made.append(nodes.literal_block(part, textwrap.dedent(part), language="text"))
        elif part.strip():
            made.append(nodes.paragraph("", "", *inline(" ".join(part.split()))))
    return made


def fields(text):
    """`name: meaning` lines, continued by indentation, as a definition list; other text as is."""
    made, items = [], []
    for entry in entries(text):
        match = re.match(ITEM, entry)
        if match:
            items.append(definition(match[1], paragraphs(unindented(entry[match.end() :]))))
        else:
            if items:
                made.append(nodes.definition_list("", *items))
                items = []
            made += paragraphs(unindented(entry))
    return made + ([nodes.definition_list("", *items)] if items else [])


def entries(text):
    """The items of a list, each with its indented lines, and the text between them."""
    found = []
    for line in text.strip("\n").splitlines():
        after_item = found and re.match(ITEM, found[-1])
        new = re.match(ITEM, line) or (after_item and line and not line.startswith(" "))
        if new or not found:
            found.append(line)
        else:
            found[-1] += f"\n{line}"
    return found


def unindented(entry):
    """An entry without the indentation of its continuation lines."""
    first, _, rest = entry.partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}"


def definition(term, body):
    return nodes.definition_list_item(
        "", nodes.term("", "", nodes.literal(term, term)), nodes.definition("", *body)
    )


def inline(text):
    """Plain text and `code`."""
    pieces = re.split(r"``?([^`]+)``?", text)
    return [
        nodes.literal(piece, piece) if place % 2 else nodes.Text(piece)
        for place, piece in enumerate(pieces)
        if piece
    ]

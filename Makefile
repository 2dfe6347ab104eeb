# Run from an environment with the extras: pip install -c constraints.txt -e '.[test,docs]'
.PHONY: test full lint docs serve bench ci

test:  ## quick tests
	pytest

full:  ## every test
	pytest --full

lint:  ## style, format, types
	ruff check
	ruff format --check
	pyright

docs:  ## figures and site, in build/site
	python docs/figures.py
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

serve:  ## site on a local port, rebuilt on changes
	NO_MKDOCS_2_WARNING=1 mkdocs serve

bench:  ## times of the layer and its parts on this GPU
	python -m benchmarks.attention --cases parts --missing

ci:  ## what CI runs
	bash .ci/run

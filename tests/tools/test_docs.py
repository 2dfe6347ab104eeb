"""README and docs: every Python snippet runs by itself, and paths, commands and figures match the tree."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *(ROOT / 'docs').rglob('*.md')])
FENCE = re.compile(r'^```(\w[^\n]*)\n(.*?)^```$', re.DOTALL | re.MULTILINE)
# Snippets whose fence reads ```python title="GPU" need a GPU.
RUNS_ANYWHERE, NEEDS_GPU = 'python', 'python title="GPU"'
MAX_README_LINES = 250
# Pages whose identifiers are all of this package.
PAGES_OF_THE_CODE = [
    *('README.md', 'CONTRIBUTING.md', 'docs/kernels.md', 'docs/layer.md', 'docs/functional.md', 'docs/decoding.md'),
    *('docs/choosing-sizes.md', 'docs/concepts.md', 'docs/faq.md', 'docs/training.md', 'docs/glossary.md'),
]


def fences(page: Path) -> list[tuple[int, str, str]]:
    """Return (line of the first line of code, info string, code) of every fenced block."""
    text = page.read_text(encoding='utf-8')
    return [(text.count('\n', 0, block.start(2)) + 1, block[1], block[2]) for block in FENCE.finditer(text)]


def snippets() -> list[Any]:
    found = []
    for page in PAGES:
        for line, info, code in fences(page):
            if info.startswith('python'):
                name = f'{page.relative_to(ROOT)}:{line}'
                found.append(pytest.param(page, line, code, id=name, marks=[pytest.mark.gpu] * (info == NEEDS_GPU)))
    return found


@pytest.mark.parametrize(('page', 'line', 'code'), snippets())
@pytest.mark.filterwarnings('default')
def test_snippet_runs_by_itself(page: Path, line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    # Line breaks before the code, so that a traceback names the line of the page.
    exec(compile('\n' * (line - 1) + code, str(page), 'exec'), {'__name__': '__main__'})


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
class TestPage:
    def test_fences_are_known(self, page: Path):
        known = {RUNS_ANYWHERE, NEEDS_GPU, 'sh', 'text', 'bibtex'}
        assert {info for _, info, _ in fences(page)} <= known

    def test_links_exist(self, page: Path):
        for target in re.findall(r'\]\(([^)#\s]+)', page.read_text(encoding='utf-8')):
            if not target.startswith(('http://', 'https://', 'mailto:')):
                assert (page.parent / target).exists(), f'{page.name} links to {target}'

    def test_named_files_exist(self, page: Path):
        folders = 'native_sparse_attention|benchmarks|docs|examples|tests|trainer|data'
        for path in re.findall(rf'`((?:{folders})/[\w./-]+)`', page.read_text(encoding='utf-8')):
            assert (ROOT / path).exists() or path.startswith('data/enwik8'), f'{page.name} names {path}'

    def test_named_commands_exist(self, page: Path):
        for module in re.findall(r'python -m (benchmarks\.\w+)', page.read_text(encoding='utf-8')):
            assert importlib.util.find_spec(module), f'{page.name} names {module}'


@pytest.mark.parametrize('page', PAGES_OF_THE_CODE)
def test_named_identifiers_exist(page: str):
    folders = ('native_sparse_attention', 'benchmarks', 'examples', 'tests/support', 'trainer')
    sources = '\n'.join(path.read_text(encoding='utf-8') for name in folders for path in (ROOT / name).rglob('*.py'))
    words = set(re.findall(r'\w+', sources))
    named = set(re.findall(r'`(\w*[a-z]_\w+|[A-Z]+_[A-Z0-9_]+)\b', (ROOT / page).read_text(encoding='utf-8')))
    assert named
    assert not named - words


def api_objects() -> list[str]:
    """Return the names that the API pages show."""
    pages = sorted((ROOT / 'docs' / 'api').glob('*.md'))
    return [name for page in pages for name in re.findall(r'^::: (\S+)$', page.read_text(encoding='utf-8'), re.M)]


@pytest.mark.parametrize('name', api_objects())
def test_docstring_has_an_entry_for_every_argument(name: str):
    shown = pkgutil.resolve_name(name)
    functions = {name: shown}
    if inspect.ismodule(shown):
        functions = {key: value for key, value in vars(shown).items() if getattr(value, '__module__', '') == name}
    for key, function in functions.items():
        if key.startswith('_') or not callable(function):
            continue
        parameters = inspect.signature(function).parameters.values()
        named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name[0] != '_'}
        described = set(re.findall(r'^ {4}(\w+): ', inspect.getdoc(function) or '', re.M))
        assert not named - described, key


def test_readme_is_short():
    assert len((ROOT / 'README.md').read_text(encoding='utf-8').splitlines()) <= MAX_README_LINES


def load_figures() -> Any:
    spec = importlib.util.spec_from_file_location('figures', ROOT / 'docs' / 'figures.py')
    assert spec is not None
    assert spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    return figures


def test_figures_are_those_that_the_script_draws():
    figures = load_figures()
    speed = figures.draw_speed(figures.read_speed())
    drawn = {'branches.svg': figures.draw_branches(), 'scores.svg': figures.draw_scores(), 'speed.svg': speed}
    drawn['learning.svg'] = figures.draw_learning(figures.read_learning())
    for name, text in drawn.items():
        assert (figures.ASSETS / name).read_text(encoding='utf-8') == text, f'run python docs/figures.py for {name}'


def test_readme_table_is_the_benchmark_result():
    figures = load_figures()
    measured = dict(figures.read_speed())
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\| ([\d,]+) \| ([\d.]+) / ([\d.]+) \| ([\d.]+) / ([\d.]+) \| ([\d.]+) \|$', text, re.MULTILINE)
    assert len(rows) == 5
    for tokens, *cells in rows:
        nsa, dense = (measured[int(tokens.replace(',', ''))][name] for name in ('nsa', 'dense'))
        times = [nsa['forward'], nsa['backward'], dense['forward'], dense['backward']]
        assert cells == [f'{value:.1f}' for value in (*times, dense['total'] / nsa['total'])], tokens
    machine = json.loads(figures.SPEED_RESULT.read_text(encoding='utf-8'))['machine']
    assert f'commit {machine["commit"]}' in text
    assert machine['gpu'] in text
    assert figures.SPEED_RESULT.with_suffix('.md').relative_to(ROOT).as_posix() in text

"""Seeds, the hypothesis profile, Triton's interpreter, and the selection of tests: gpu, slow and full."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

# With Python's thresholds a tenth of the time would go to searches for cycles among modules and traced graphs.
gc.set_threshold(20_000, 20, 20)

# The tensors of the tests are small, and threads would wait for each other longer than they compute.
torch.set_num_threads(1)
os.environ.setdefault('OMP_NUM_THREADS', '1')  # of processes that tests start

# Without a GPU the kernels run in Triton's interpreter. Triton reads this when it decorates a kernel, so it is set
# before anything imports one. Processes that tests start inherit it.
if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')

# The same examples every time. `pytest --hypothesis-profile search` looks for new ones.
hypothesis.settings.register_profile('suite', derandomize=True, database=None, deadline=None, max_examples=25)
hypothesis.settings.register_profile('search', deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile('suite')


class TorchRandom:
    """Adapt torch's generator to hypothesis, so that every example starts from the same state."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> tuple[int, ...]:
        return tuple(torch.get_rng_state().tolist())

    def setstate(self, state: tuple[int, ...]) -> None:
        torch.set_rng_state(torch.tensor(state, dtype=torch.uint8))


torch_random = TorchRandom()  # hypothesis keeps a weak reference
hypothesis.register_random(torch_random)


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope='session', autouse=True)
def fast_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get('TRITON_INTERPRET') == '1' and importlib.util.find_spec('triton'):
            from tests.support.fast_interpreter import speed_up

            speed_up(patch)
        yield


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


REASONS = {
    'gpu': 'no CUDA device',
    'slow': 'takes minutes; -m slow runs it',
    'full': 'not in the quick run; --full runs it',
    'combination': 'each pair of its parameters occurs in another case; --combinations runs it',
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--full', action='store_true', help='run every test that is not slow')
    parser.addoption('--combinations', action='store_true', help='with --full, run every combination of parameters')


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use the cores for whole folders. Named files, tests and markers, and a GPU, get one process."""
    is_named = any('::' in argument or argument.endswith('.py') for argument in config.args)
    one_process = is_named or config.getoption('-m') or torch.cuda.is_available()
    return 0 if one_process else min(os.cpu_count() or 1, 8)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_named = any('::' in argument for argument in config.args)
    runs = {
        'gpu': torch.cuda.is_available(),
        'slow': 'slow' in str(config.getoption('-m')),
        'full': is_named or config.getoption('--full'),
        'combination': is_named or config.getoption('--combinations'),
    }
    skips = {marker: pytest.mark.skip(reason=REASONS[marker]) for marker in REASONS if not runs[marker]}
    for item in items:
        found = next((skips[marker] for marker in skips if item.get_closest_marker(marker)), None)
        if found:
            item.add_marker(found)


def pytest_collection_finish() -> None:
    """Leave modules and tests out of later searches for cycles."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests were skipped, by reason."""
    reasons = Counter(report.longrepr[2].removeprefix('Skipped: ') for report in terminalreporter.getreports('skipped'))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f'{count:,} skipped: {reason}')


@pytest.fixture
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not render figures, which takes longer than a small run, except in tests marked `pictures`."""
    from matplotlib.figure import Figure

    if not request.node.get_closest_marker('pictures'):
        monkeypatch.setattr(Figure, 'savefig', lambda self, file, **_: file.write(b'no picture'))


@pytest.fixture
def instant_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all cases of a benchmark take equally long, without running them."""
    from benchmarks import runner

    class Worker:
        def __init__(self, environment: dict[str, str]) -> None:
            self.alive = True

        def measure(self, case: runner.Case, seconds: float) -> runner.Case:
            return {'forward_ms': 1.0, 'backward_ms': 2.0}

        def stop(self) -> None: ...

    monkeypatch.setattr(runner, 'Worker', Worker)

"""Seeds, the hypothesis profile, Triton's interpreter, and the selection of tests: gpu, slow and full."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import hypothesis
import pytest
import torch

# The tensors of the tests are small, and threads would wait for each other longer than they compute.
torch.set_num_threads(1)

# Without a GPU the kernels run in Triton's interpreter. Triton reads this when it decorates a kernel, so it is set
# before anything imports one. Processes that tests start inherit it.
if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')

# The same examples every time. `pytest --hypothesis-profile search` looks for new ones.
hypothesis.settings.register_profile('suite', derandomize=True, database=None, deadline=None, max_examples=25)
hypothesis.settings.register_profile('search', deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile('suite')


class TorchRandom:
    """torch's generator as hypothesis wants it, so that every example starts from the same state."""

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


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--full', action='store_true', help='also run the tests marked full')


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_full = config.getoption('--full') or any('::' in argument for argument in config.args)
    skipped = {
        'gpu': None if torch.cuda.is_available() else 'no CUDA device',
        'slow': None if 'slow' in str(config.getoption('-m')) else 'takes minutes; -m slow runs it',
        'full': None if is_full else 'not in the quick run; --full runs it',
    }
    for item in items:
        reasons = [reason for marker, reason in skipped.items() if reason and item.get_closest_marker(marker)]
        if reasons:
            item.add_marker(pytest.mark.skip(reason=reasons[0]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests were skipped, by reason."""
    reasons = Counter(report.longrepr[2].removeprefix('Skipped: ') for report in terminalreporter.getreports('skipped'))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f'{count:,} skipped: {reason}')


@pytest.fixture
def instant_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks whose cases are not run: all take as long."""
    from benchmarks import runner

    class Worker:
        def __init__(self, environment: dict[str, str]) -> None:
            self.alive = True

        def measure(self, case: runner.Case, seconds: float) -> runner.Case:
            return {'forward_ms': 1.0, 'backward_ms': 2.0}

        def stop(self) -> None: ...

    monkeypatch.setattr(runner, 'Worker', Worker)

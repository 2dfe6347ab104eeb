"""Importing the package only defines names; directions of imports; devices of new tensors."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import native_sparse_attention

PACKAGE = Path(native_sparse_attention.__file__).parent
FILES = sorted(PACKAGE.rglob('*.py'))
BACKENDS = {'eager', 'flex', 'triton'}

# A module imports from lines above its own. Modules of one line do not import each other, except ops (below).
LINES = (
    {'core'},
    {'ops'},
    {'autograd', 'build', 'composition'},
    {'inference.lengths', 'inference.ring', 'inference.session', 'nn.linear'},
    {'functional', 'losses', 'testing', 'nn.compress', 'nn.gate', 'nn.padding', 'nn.rotary', 'inference.cache'},
    {'inference.paged_cache', 'inference.model_cache', 'inference.phi', 'inference.rollback', 'nn.checks', 'nn.heads'},
    {'inference.decode_checks', 'nn.layer'},
    {'inference.decode'},
    {'nn.attention', 'nn.dense', 'inference.generation'},
    {'nn.start'},
    {'nn.generator', 'nn.pretrained'},
    {'nn.transformer'},
    {'integrations', 'distributed'},
    {'transformer', 'compress', 'generation', 'parts', 'compat'},
)

# Folders whose modules may import each other; the direction inside `ops` has a test of its own.
SAME = (('core',), ('ops',), ('autograd',), ('nn', 'compress'), ('integrations', 'transformers'), ('distributed',))

# Run in a process of its own. torch is imported first, so that its effects on the process do not count.
IMPORT = """
import os, sys
import torch, einops, rotary_embedding_torch
def probed(*args, **kwargs):
    raise AssertionError('the import probes a GPU')
for name in ('is_available', 'device_count', 'current_device', 'get_device_properties', 'init'):
    setattr(torch.cuda, name, probed)
before = dict(os.environ), torch.get_default_dtype(), torch.get_num_threads(), torch.random.get_rng_state().sum()
import native_sparse_attention
import native_sparse_attention.nn.compress, native_sparse_attention.ops, native_sparse_attention.nn.transformer
import native_sparse_attention.integrations.fla, native_sparse_attention.integrations.lucidrains
after = dict(os.environ), torch.get_default_dtype(), torch.get_num_threads(), torch.random.get_rng_state().sum()
assert before == after, [pair for pair in zip(before, after) if pair[0] != pair[1]]
assert 'triton' not in sys.modules, 'the import imports triton'
assert not torch.cuda.is_initialized()
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, '-W', 'error::DeprecationWarning:native_sparse_attention', '-c', code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_does_nothing_else():
    done = run_python(IMPORT, CUDA_VISIBLE_DEVICES='')
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='triton is installed on Linux')
def test_works_without_triton():
    """A layer runs where triton cannot be imported."""
    code = """
import sys
sys.modules['triton'] = None
import torch
from native_sparse_attention import SparseAttention
attn = SparseAttention(16, 8, 2, 4, 4, 2, 4, 4, causal=True)
attn(torch.randn(1, 9, 16)).sum().backward()
"""
    done = run_python(code, CUDA_VISIBLE_DEVICES='')
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def module_of(file: Path) -> tuple[str, ...]:
    """Return ('ops', 'window_attention', 'eager') for native_sparse_attention/ops/window_attention/eager.py."""
    parts = file.relative_to(PACKAGE).with_suffix('').parts
    return parts[:-1] if parts[-1] == '__init__' else parts


MODULES = {module_of(file): file for file in FILES}


def imports_of(tree: ast.AST, module: tuple[str, ...], is_package: bool) -> Iterator[tuple[str, ...]]:
    """Return every module that a file imports, at the top or inside a function, as the parts of its absolute name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split('.')) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split('.')) if node.module else ()
            if node.level:
                here = (PACKAGE.name, *module)
                base = here[: len(here) - node.level + is_package] + base
            yield from ((*base, alias.name) for alias in node.names)


def outside_imports(file: Path) -> set[tuple[str, ...]]:
    return {name for name in all_imports(file) if name[0] != PACKAGE.name}


def inside_imports(file: Path) -> set[tuple[str, ...]]:
    """Return modules of the package, without its name: a name of no module is an attribute of the one before."""
    inside = {name[1:] for name in all_imports(file) if name[0] == PACKAGE.name}
    return {name if name in MODULES else name[:-1] for name in inside}


def all_imports(file: Path) -> set[tuple[str, ...]]:
    tree = ast.parse(file.read_text(encoding='utf-8'))
    return set(imports_of(tree, module_of(file), file.name == '__init__.py'))


def dotted(modules: set[tuple[str, ...]]) -> list[str]:
    return sorted('.'.join(name) for name in modules)


every_file = pytest.mark.parametrize('file', FILES, ids=[str(file.relative_to(PACKAGE)) for file in FILES])


@every_file
def test_only_triton_folders_import_triton(file: Path):
    folders = {part.removeprefix('_') for part in file.relative_to(PACKAGE).parts[:-1]}
    found = {name for name in outside_imports(file) if name[0] == 'triton'}
    if file == MODULES['core', 'private_triton']:  # inside functions, which those folders call
        tree = ast.parse(file.read_text(encoding='utf-8'))
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        found = {name for node in imports for name in imports_of(node, module_of(file), False) if name[0] == 'triton'}
    assert 'triton' in folders or not found


FACTORIES = {
    'arange',
    'as_tensor',
    'empty',
    'eye',
    'full',
    'linspace',
    'ones',
    'rand',
    'randint',
    'randn',
    'tensor',
    'zeros',
}


def without_device(source: str) -> list[str]:
    """Return calls that make a tensor on the default device, except for new parameters."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    parameters = [id(arg) for call in calls if ast.unparse(call.func) == 'nn.Parameter' for arg in call.args]
    return [
        ast.unparse(call)
        for call in calls
        if ast.unparse(call.func).removeprefix('torch.') in FACTORIES and ast.unparse(call.func).startswith('torch.')
        if id(call) not in parameters and not {'device', None} & {keyword.arg for keyword in call.keywords}
    ]


@every_file
def test_tensors_are_made_on_a_named_device(file: Path):
    """Calls give the same results under any default device."""
    assert not without_device(file.read_text(encoding='utf-8'))


def test_calls_without_device_are_found():
    assert without_device('torch.zeros(3)') == ['torch.zeros(3)']
    assert not without_device('torch.zeros(3, device=x.device), torch.ones(3, **kind), nn.Parameter(torch.empty(3))')


def test_geometry_is_integer_arithmetic():
    tree = ast.parse(MODULES['core', 'geometry'].read_text(encoding='utf-8'))
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {'.'.join(name) for name in outside_imports(MODULES['core', 'geometry'])} | attributes
    assert not [name for name in names if name.startswith(('torch.nn', 'triton'))]
    assert not inside_imports(MODULES['core', 'geometry'])


def line_of(module: tuple[str, ...]) -> int:
    if not module or module in (('nn',), ('inference',)):
        return len(LINES)  # public paths, which nothing inside the package imports
    found = [i for i, names in enumerate(LINES) if module[0] in names or '.'.join(module[:2]) in names]
    assert found, f'{".".join(module)} has no place in the direction of imports: give it one in LINES'
    return found[0]


def starts_with(module: tuple[str, ...], folder: tuple[str, ...]) -> bool:
    return module[: len(folder)] == folder


@every_file
def test_direction_of_imports(file: Path):
    module = module_of(file)
    wrong = {
        name
        for name in inside_imports(file)
        if line_of(name) >= line_of(module)
        and not any(module[: len(same)] == name[: len(same)] == same for same in SAME)
    }
    assert not wrong, f'{".".join(module)} imports {dotted(wrong)}'


def ops_line_of(module: tuple[str, ...]) -> int:
    """Return the line inside ops: shared code, backends, api, folder of an op, the whole."""
    if len(module) == 1:
        return 4
    if len(module) == 2:
        return 3 if MODULES[module].name == '__init__.py' and not module[1].startswith('_') else 0
    if module[1].startswith('_'):
        return 0
    return 2 if module[2] == 'api' else 1


def backend_of(module: tuple[str, ...]) -> set[str]:
    return {part.removeprefix('_') for part in module} & BACKENDS


OPS = [file for module, file in MODULES.items() if module[:1] == ('ops',)]


@pytest.mark.parametrize('file', OPS, ids=[str(file.relative_to(PACKAGE)) for file in OPS])
def test_ops_and_their_backends_keep_apart(file: Path):
    """api → its own backends → what ops share; a backend knows no other, an op knows no other op."""
    module = module_of(file)
    line = ops_line_of(module)
    for name in inside_imports(file):
        if name[0] != 'ops':
            continue
        assert not backend_of(module) or backend_of(name) <= backend_of(module), f'{dotted({name})}: another backend'
        other_line = ops_line_of(name)
        assert other_line < line or (other_line == line and line < 2), f'{dotted({name})}: against the direction'
        if 0 < line < 4 and other_line:
            assert name[1] == module[1], f'{dotted({name})}: another op'

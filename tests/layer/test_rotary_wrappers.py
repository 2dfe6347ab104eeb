"""Frequencies stay float32 under casts, precision policies, sharding, meta initialisation, copies and compilers."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.rotary import Rotary
from tests.layer.test_attention import make_layer, tokens

CPU = torch.device('cpu')
OLD_KEY = 'rotary.rotary_emb.freqs'
FAR = torch.tensor([[100_003]])


def frequencies(layer: SparseAttention) -> Tensor:
    assert layer.rotary is not None
    return layer.rotary(CPU)


def saved_and_loaded(layer: SparseAttention) -> SparseAttention:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    if not torch.distributed.is_available():
        pytest.skip('torch was built without distributed')
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield torch.distributed.init_device_mesh('cpu', (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize('dim_head', [3, 4, 6, 64, 100])
def test_default_frequencies_are_those_of_the_library(dim_head: int) -> None:
    expected = RotaryEmbedding(dim_head).freqs.data
    assert Rotary(dim_head)(CPU).equal(expected)
    with torch.device('meta'):
        rotary = Rotary(dim_head)
    assert rotary(CPU).equal(expected)


CHANGES: dict[str, Callable[[SparseAttention], SparseAttention]] = {
    'bfloat16': lambda layer: layer.bfloat16(),
    'double': lambda layer: layer.double(),
    'half and back': lambda layer: layer.half().float(),
    'to_empty': lambda layer: layer.to_empty(device='cpu'),
    'meta and back': lambda layer: layer.to('meta').to_empty(device='cpu'),
    'deepcopy': deepcopy,
    'pickle': lambda layer: pickle.loads(pickle.dumps(layer)),
    'torch.save': saved_and_loaded,
}


@pytest.mark.parametrize('change', CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize('rotary_emb', [None, RotaryEmbedding(4, theta=500)], ids=['default', 'custom'])
def test_fixed_frequencies_survive(change: Callable, rotary_emb: RotaryEmbedding | None) -> None:
    layer = make_layer(rotary_emb=rotary_emb)
    expected = frequencies(layer).clone()
    for changed in (change(layer), change(change(layer))):
        assert frequencies(changed).dtype == torch.float32
        assert frequencies(changed).equal(expected)
        assert changed.rotary is not None
        assert changed.rotary.tables(FAR)[0].equal((FAR[..., None] * expected).cos())


@pytest.mark.parametrize('learned', [False, True])
def test_parameters_and_state_have_learned_frequencies_alone(learned: bool) -> None:
    layer = make_layer(rotary_emb=RotaryEmbedding(6, learned_freq=learned))
    names = {name for name, _ in layer.named_parameters() if 'rotary' in name}
    assert names == ({OLD_KEY} if learned else set())
    assert {key for key in layer.state_dict() if 'rotary' in key} == names
    assert all(p.requires_grad for p in layer.parameters())
    assert learned or not [name for name, _ in layer.named_buffers() if 'rotary' in name]


def test_the_frequencies_are_a_copy_of_those_given() -> None:
    emb = RotaryEmbedding(6)
    layer, expected = make_layer(rotary_emb=emb), emb.freqs.clone()
    emb.freqs.data.zero_()
    assert frequencies(layer).equal(expected)


def test_frequencies_follow_the_device() -> None:
    rotary = Rotary(6)
    assert rotary(torch.device('meta')).device.type == 'meta'
    assert rotary.tables(FAR)[0].equal((FAR[..., None] * RotaryEmbedding(6).freqs.data).cos())
    copy = rotary(CPU)
    assert rotary(CPU) is copy


@pytest.mark.gpu
def test_frequencies_follow_the_layer_before_a_capture() -> None:
    rotary = Rotary(6).cuda()
    positions, graph = torch.arange(5, device='cuda')[None], torch.cuda.CUDAGraph()
    angles = positions[..., None] * RotaryEmbedding(6).freqs.data.cuda()
    with torch.cuda.graph(graph):
        cos, sin = rotary.tables(positions)
    graph.replay()
    assert cos.equal(angles.cos())
    assert sin.equal(angles.sin())


@pytest.mark.parametrize('assign', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_state_dicts_of_earlier_versions_load(assign: bool, dtype: torch.dtype) -> None:
    layer, loaded = make_layer(), RotaryEmbedding(6, theta=300).freqs.data
    held = frequencies(layer)
    layer.load_state_dict({**layer.state_dict(), OLD_KEY: loaded.to(dtype)}, assign=assign)
    assert frequencies(layer).equal(loaded)
    assert frequencies(layer) is held  # captured graphs hold its address
    layer.load_state_dict(layer.state_dict())
    assert frequencies(layer).equal(loaded)


def test_rounded_state_dicts_do_not_round_the_frequencies() -> None:
    layer = make_layer()
    expected = frequencies(layer).clone()
    rounded = {key: value.bfloat16() for key, value in (layer.state_dict() | {OLD_KEY: expected}).items()}
    layer.load_state_dict(rounded)
    assert frequencies(layer).equal(expected)


def test_frequencies_of_another_number_do_not_load() -> None:
    layer = make_layer()
    with pytest.raises(RuntimeError, match=r'size mismatch for rotary.rotary_emb.freqs: \(2,\) in the state dict'):
        layer.load_state_dict(layer.state_dict() | {OLD_KEY: torch.ones(2)})


def test_an_instance_without_values() -> None:
    with torch.device('meta'):
        emb = RotaryEmbedding(6)
    layer, x = make_layer(rotary_emb=emb), tokens(1, 9)
    with pytest.raises(ValueError, match='made on the meta device, so its frequencies have no values'):
        layer(x)
    layer.load_state_dict(layer.state_dict() | {OLD_KEY: RotaryEmbedding(6).freqs.data})
    assert layer(x).isfinite().all()


def sharding(kind: str, dtype: torch.dtype, mesh: Any) -> Callable[..., Any]:
    """Shard a module, with weights cast to the dtype for the forward."""
    fsdp = pytest.importorskip('torch.distributed.fsdp')
    if kind == 'FSDP2':
        return lambda m: fsdp.fully_shard(m, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=dtype))
    precision = fsdp.MixedPrecision(param_dtype=dtype)
    return lambda m: fsdp.FullyShardedDataParallel(
        m, mixed_precision=precision, device_id=CPU, use_orig_params=kind == 'FSDP1, original parameters'
    )


@pytest.mark.parametrize('kind', ['FSDP2', 'FSDP1', 'FSDP1, original parameters'])
def test_precision_policies_leave_the_angles(mesh: Any, kind: str) -> None:
    torch.manual_seed(0)
    layer, x = make_layer(backend='eager'), tokens(1, 40).bfloat16()
    expected = deepcopy(layer).bfloat16()(x)
    seen: list[Any] = []
    assert layer.rotary is not None
    layer.rotary.register_forward_hook(lambda module, args, freqs: seen.append(freqs))
    out = sharding(kind, torch.bfloat16, mesh)(layer)(x)
    assert out.dtype == torch.bfloat16
    assert [freqs.dtype for freqs in seen] == [torch.float32]
    assert seen[0].equal(RotaryEmbedding(6).freqs.data)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.float().sum().backward()


def test_learned_frequencies_in_a_half_type_are_refused(mesh: Any) -> None:
    layer = make_layer(backend='eager', rotary_emb=RotaryEmbedding(6, learned_freq=True)).float()
    x = tokens(1, 9)
    shard = sharding('FSDP2', torch.bfloat16, mesh)
    unit = deepcopy(layer)
    with pytest.raises(ValueError, match=r'bfloat16 in the forward, but learned .* by a fully_shard unit of their own'):
        shard(layer)(x.bfloat16())

    from torch.distributed.fsdp import fully_shard

    expected = deepcopy(unit).bfloat16()(x.bfloat16())
    assert unit.rotary is not None
    fully_shard(unit.rotary, mesh=mesh)
    out = shard(unit)(x.bfloat16())
    assert out.equal(expected)
    out.float().square().sum().backward()
    freqs = unit.get_parameter(OLD_KEY)
    assert freqs.grad is not None
    assert freqs.dtype == freqs.grad.dtype == torch.float32
    with torch.no_grad():
        unit.eval()(x.bfloat16(), return_cache=True)


TWO_PROCESSES = """
import sys
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from native_sparse_attention import SparseAttention

rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=2)
torch.manual_seed(0)
with torch.device('meta'):
    layer = SparseAttention(16, 6, 2, 4, 4, 2, 4, 3, causal=True, backend='eager')
fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
layer.to_empty(device='cpu')
torch.manual_seed(1)
for p in layer.parameters():
    torch.nn.init.constant_(p, 0.1)
seen = []
layer.rotary.register_forward_hook(lambda module, args, freqs: seen.append(freqs))
layer(torch.randn(1, 20, 16, dtype=torch.bfloat16)).float().sum().backward()
expected = 1 / 10000 ** (torch.arange(0, 6, 2) / 6)
assert len(seen) == 1 and seen[0].dtype == torch.float32 and torch.equal(seen[0], expected), seen
torch.distributed.barrier()  # or one process may end while the other still talks to it
torch.distributed.destroy_process_group()
"""


def test_two_processes_from_meta(tmp_path: Path) -> None:
    if not torch.distributed.is_available():
        pytest.skip('torch was built without distributed')
    ranks = [
        subprocess.Popen(
            [sys.executable, '-c', TWO_PROCESSES, str(rank), f'{tmp_path}/store'],
            env=os.environ | {'OMP_NUM_THREADS': '1'},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


@pytest.mark.parametrize('moved', [False, True])
def test_compiles_into_one_graph(moved: bool) -> None:
    """Compiled once; at most once more where the frequencies were on another device, without a copy from the CPU."""
    torch._dynamo.reset()
    rotary = Rotary(6)
    if moved:
        rotary._on_device = rotary(torch.device('meta'))  # as after a call there
    graphs = CompileCounter()
    compiled = torch.compile(rotary.tables, backend=graphs, fullgraph=True)
    for position in (3, 5, 100_003, 7):
        cos, _ = compiled(torch.tensor([[position]]))
        assert cos.equal((position * RotaryEmbedding(6).freqs.data).cos()[None, None])
    assert 1 <= graphs.frame_count <= 1 + moved  # PyTorch 2.11 does not compile again
    torch._dynamo.reset()


@pytest.mark.parametrize('learned', [False, True])
def test_reset_parameters(learned: bool) -> None:
    emb = RotaryEmbedding(6, theta=77, learned_freq=learned)
    rotary, expected = Rotary(6, emb), emb.freqs.detach().clone()
    if learned:
        nn.init.zeros_(emb.freqs)
    rotary.reset_parameters()
    assert rotary(CPU).equal(expected)


def test_under_transforms_nothing_of_them_is_kept() -> None:
    rotary = Rotary(6)
    rotary._on_device = rotary(torch.device('meta'))  # as after a call elsewhere
    torch.func.vmap(lambda position: rotary.tables(position[None, None])[0])(torch.arange(3))
    torch.func.grad(lambda x: (rotary.tables(torch.arange(3)[None])[0] * x).sum())(torch.ones(()))
    assert rotary(CPU).equal(RotaryEmbedding(6).freqs.data)

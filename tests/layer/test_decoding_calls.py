"""Cached decoding calls the modules of a model: hooks run, and sharded weights are gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from native_sparse_attention.inference.generation import DecodeStep
from native_sparse_attention.nn.transformer import Block, Transformer
from tests.layer.test_transformer import KINDS, make_ids, make_model


def called_modules(model: Transformer) -> dict[str, nn.Module]:
    """Return the modules that a forward calls once, by name: no lists, no modules inside φ, rotary and gates."""
    parts = {'': model, 'token_emb': model.token_emb, 'norm': model.norm, 'to_logits': model.to_logits}
    for index, block in enumerate(model.blocks):
        of_block = {'': block, 'attention': block.attention, 'feed_forward': block.feed_forward}
        of_block |= {name: getattr(block.attention, name) for name in ('norm', 'to_qkv', 'combine_heads')}
        parts |= {f'{index}.{name}': module for name, module in of_block.items()}
    return parts


def count_calls(model: Transformer) -> Counter[str]:
    calls: Counter[str] = Counter()
    for name, module in called_modules(model).items():
        module.register_forward_pre_hook(lambda *_, name=name: calls.update([f'before {name}']))
        module.register_forward_hook(lambda *_, name=name: calls.update([f'after {name}']))
    return calls


def run_forward(model: Transformer, ids: Tensor) -> int:
    cache = model.init_cache(len(ids), 16)
    for part in ids.split([6, 1, 1, 3], 1):
        model(part, cache=cache)
    return 4


def run_growing(model: Transformer, ids: Tensor) -> int:
    _, cache = model(ids[:, :4], return_cache=True)
    model(ids[:, 4:], cache=cache, return_cache=True)
    return 2


def run_prefill(model: Transformer, ids: Tensor) -> int:
    model.prefill(ids, model.init_cache(len(ids), 16), mask=torch.ones_like(ids), chunk_size=4)
    return 3


def run_steps(model: Transformer, ids: Tensor) -> int:
    step = DecodeStep(model, model.init_cache(len(ids), 16))
    for token in ids.split(1, 1):
        step(token)
    return ids.shape[1]


def run_generate(model: Transformer, ids: Tensor) -> int:
    model.generate(ids, 5, temperature=0.0)
    return 5


def run_sample(model: Transformer, ids: Tensor) -> int:
    for use_cache_kv in (True, False):
        model.sample(ids, ids.shape[1] + 3, use_cache_kv=use_cache_kv)
    return 6


RUNS = [run_forward, run_growing, run_prefill, run_steps, run_generate, run_sample]


@KINDS
@pytest.mark.parametrize('run', RUNS)
def test_every_hook_runs(run: Callable[[Transformer, Tensor], int], sparse: bool) -> None:
    model = make_model(sparse, backend='eager')
    calls = count_calls(model)
    count = run(model, make_ids(2, 11))
    assert calls == {f'{when} {name}': count for when in ('before', 'after') for name in called_modules(model)}


def scaled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 1.5 * out


@KINDS
@pytest.mark.parametrize('part', ['block', 'attention'])
def test_a_hook_changes_what_is_decoded(sparse: bool, part: str) -> None:
    """Outputs of hooked modules are tensors in cached decoding, as in the full forward pass."""
    model = make_model(sparse, backend='eager')
    unhooked = model(make_ids(2, 11))
    for block in model.blocks:
        (block if part == 'block' else block.attention).register_forward_hook(scaled)
    ids = make_ids(2, 11)
    expected = model(ids)
    assert not torch.allclose(expected, unhooked)
    cache = model.init_cache(2, 11)
    out = torch.cat([model(p, cache=cache) for p in ids.split([6, 1, 4], 1)], 1)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('register', ['hook', 'forward', 'global'])
def test_no_graph_where_python_would_be_left_out(register: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(True)
    cache = model.init_cache(1, 8)
    for block in model.blocks:
        monkeypatch.setattr(block.attention, 'decodes_fixed', lambda *_: True)
    assert model.decodes_fixed(cache, 1)
    linear = model.blocks[1].attention.to_qkv
    if register == 'hook':
        handle = linear.register_forward_hook(lambda *_: None)
    elif register == 'global':
        handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    else:
        handle = None
        linear.forward = linear.forward  # as offloading does
    assert not model.decodes_fixed(cache, 1)
    if handle is None:
        del linear.forward
    else:
        handle.remove()
    assert model.decodes_fixed(cache, 1)


@pytest.mark.parametrize(
    'changes', [{'return_loss': True}, {'cu_seqlens': torch.tensor([0, 3])}, {'ids': make_ids(1, 0)}]
)
def test_refusals_of_last_only(changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {'ids': make_ids(1, 3)} | changes
    with pytest.raises(ValueError, match='last_only is True, but needs rows with tokens'):
        make_model(False)(last_only=True, **arguments)


@KINDS
def test_the_last_logits_alone(sparse: bool) -> None:
    model, ids = make_model(sparse, backend='eager'), make_ids(3, 9)
    mask = torch.arange(9) < torch.tensor([9, 1, 5])[:, None]
    torch.testing.assert_close(model(ids, last_only=True), model(ids)[:, -1])
    found, expected = model(ids, mask=mask, last_only=True), model(ids, mask=mask)
    torch.testing.assert_close(found, expected[torch.arange(3), torch.tensor([8, 0, 4])])
    cached, _ = model(ids, mask=mask, last_only=True, return_cache=True)
    torch.testing.assert_close(cached, found, rtol=1e-9, atol=1e-9)


def blocks(model: Transformer) -> Iterator[nn.Module]:
    yield from model.blocks


def layers(model: Transformer) -> Iterator[nn.Module]:
    for block in model.blocks:
        yield from (block.attention, block.feed_forward)


def networks(model: Transformer) -> Iterator[nn.Module]:
    for block in model.blocks:
        yield from (block.attention.k_compress, block.attention.v_compress, block)  # type: ignore[misc]


def leaves(model: Transformer) -> Iterator[nn.Module]:
    yield from (m for m in model.modules() if isinstance(m, nn.Linear | nn.RMSNorm | nn.Embedding))


def everything(model: Transformer) -> Iterator[nn.Module]:
    yield from (m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear | Block | Transformer))


def root(model: Transformer) -> Iterator[nn.Module]:
    yield model


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    if not torch.distributed.is_available():
        pytest.skip('torch was built without distributed')
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield torch.distributed.init_device_mesh('cpu', (1,))
    torch.distributed.destroy_process_group()


UNITS = [blocks, layers, networks, leaves, everything, root]


@KINDS
@pytest.mark.parametrize('units', UNITS)
def test_sharded_models_decode(units: Callable[[Transformer], Iterator[nn.Module]], sparse: bool, mesh: Any) -> None:
    """Weights are whole only inside a call of the module that shards them: outside they are DTensors."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    if units is networks and not sparse:
        pytest.skip('a dense model has no networks')
    model, ids = make_model(sparse, backend='eager'), make_ids(2, 11)
    mask = torch.arange(11) < torch.tensor([11, 7])[:, None]

    def results() -> list[Tensor]:
        cache = model.init_cache(2, 16)
        step = DecodeStep(model, cache)
        logits = [model.prefill(ids, cache, mask=mask, chunk_size=4)[:, None], step(ids[:, :1]), step(ids[:, 1:2])]
        logits.append(model(ids[:, 2:4], cache=cache))
        _, growing = model(ids, return_cache=True)
        logits.append(model(ids[:, :1], cache=growing))
        return [*logits, model.generate(ids, 4, seed=1), model.sample(ids, 14, 0.0, use_cache_kv=True)]

    expected = results()
    for module in units(model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for found, wanted in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert any(isinstance(p, DTensor) for p in model.parameters())


@KINDS
def test_sharded_in_half_precision(sparse: bool, mesh: Any) -> None:
    """A policy casts weights inside a call: the cache holds what init_cache was given, and the logits are near."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, ids = make_model(sparse, backend='eager').float(), make_ids(2, 11)
    expected = model(ids)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for dtype in (None, torch.bfloat16):
        cache = model.init_cache(2, 11, dtype=dtype)
        out = torch.cat([model(p, cache=cache) for p in ids.split([6, 1, 4], 1)], 1).float()
        assert (out - expected).norm() / expected.norm() < 0.03

"""The language model: dense and sparse models differ in attention alone; cached = full forward; generation; loss."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn

from native_sparse_attention.nn.attention import SparseAttention
from native_sparse_attention.nn.compress import AttentionPool, MeanPool
from native_sparse_attention.nn.transformer import DEFAULT_SPARSE_ATTN_KWARGS, DenseAttention, Transformer

KINDS = pytest.mark.parametrize('sparse', [False, True], ids=['dense', 'sparse'])
VOCABULARY = 29
SPARSE: dict[str, Any] = {
    'sliding_window_size': 3,
    'compress_block_size': 5,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 5,
    'use_diff_topk': True,
}


def make_model(sparse: bool, **changes: Any) -> Transformer:
    """Return a float64 model without zero parameters, so that every part shows in the output."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        'dim': 24,
        'depth': 2,
        'dim_head': 8,
        'heads': 4,
        'kv_heads': 2,
        'sparse_attn_kwargs': SPARSE,
    }
    model = Transformer(VOCABULARY, use_sparse_attn=sparse, **(defaults | changes)).double()
    for parameter in trained(model).values():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()  # caches need evaluation mode


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def make_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def pad(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Return ids `[B, T]` with -100 at padding, and the mask of the real tokens."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), -100)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        start = longest - len(row) if side == 'left' else 0
        ids[i, start : start + len(row)] = row
        mask[i, start : start + len(row)] = True
    return ids, mask


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_dense_and_sparse_differ_in_the_attention_alone():
    torch.manual_seed(7)
    dense = Transformer(VOCABULARY, 24, 2, 8, 4, 2)
    torch.manual_seed(7)
    sparse = Transformer(VOCABULARY, 24, 2, 8, 4, 2, use_sparse_attn=True)
    assert all(isinstance(m, DenseAttention) for m in (block.attention for block in dense.blocks))
    assert all(isinstance(m, SparseAttention) for m in (block.attention for block in sparse.blocks))
    theirs = dict(sparse.named_parameters())
    shared = {name: p for name, p in dense.named_parameters() if '.attention.' not in name}
    assert shared.keys() == {name for name in theirs if '.attention.' not in name}
    assert all(torch.equal(p, theirs[name]) for name, p in shared.items())
    attention = {name: p for name, p in dense.named_parameters() if '.attention.' in name}
    assert all(p.shape == theirs[name].shape for name, p in attention.items())


def test_layers_share_no_module_of_the_settings():
    modules = {
        'strategy_combine_mlp': nn.Linear(8, 6),
        'compress_mlp': (MeanPool(), AttentionPool(4, 4)),
        'rotary_emb': RotaryEmbedding(4, learned_freq=True),
    }
    settings = {**DEFAULT_SPARSE_ATTN_KWARGS, **modules}
    model = Transformer(9, 8, 2, 4, 2, use_sparse_attn=True, sparse_attn_kwargs=settings)
    first, second = ({id(p) for p in block.parameters()} for block in model.blocks)
    assert first
    assert not first & second


def test_dense_twin_takes_the_shape_of_the_sparse_attention():
    kwargs = dict(SPARSE, dim_value_head=12, norm=False, compress_mlp=(nn.Identity(), nn.Identity()))
    attn = Transformer(VOCABULARY, 24, 1, 8, 4, 2, sparse_attn_kwargs=kwargs).blocks[0].attention
    assert isinstance(attn, DenseAttention)
    assert attn.dim_value_head == 12
    assert isinstance(attn.norm, nn.Identity)


@KINDS
def test_tied_embeddings(sparse):
    model = make_model(sparse, tie_embeddings=True)
    assert model.to_logits.weight is model.token_emb.weight
    untied = make_model(sparse)
    assert untied.to_logits.weight is not untied.token_emb.weight
    names = [name for name, _ in untied.named_parameters()]
    assert len(names) == len(list(model.parameters())) + 1
    assert Transformer(VOCABULARY, 256, 1, tie_embeddings=True)(make_ids(1, 8)).std() < 2


@KINDS
def test_gradients_reach_every_parameter(sparse):
    model = make_model(sparse)
    model(make_ids(2, 40), return_loss=True).backward()
    for name, parameter in trained(model).items():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@KINDS
def test_future_tokens_change_nothing(sparse):
    model, ids = make_model(sparse).float(), make_ids(1, 33)
    changed = ids.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % VOCABULARY
    assert torch.equal(model(ids)[:, :20], model(changed)[:, :20])


@KINDS
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_steps_and_chunks_equal_one_call(sparse, data):
    model = make_model(sparse)
    length = data.draw(st.integers(1, 40), label='length')
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4), label='cuts'))
    ids = make_ids(2, length)
    whole = model(ids)
    cache = model.init_cache(2, length)
    chunks = [model(ids[:, i:j], cache=cache) for i, j in zip([0, *cuts], [*cuts, length], strict=True) if j > i]
    assert_near(torch.cat(chunks, dim=1), whole)
    cache = None
    steps = []
    for t in range(length):
        logits, cache = model(ids[:, t : t + 1], cache=cache, return_cache=True)
        assert logits.grad_fn is None
        steps.append(logits)
    assert_near(torch.cat(steps, dim=1), whole)


@KINDS
@pytest.mark.parametrize('side', ['left', 'right'])
def test_rows_of_different_lengths_through_the_cache(sparse, side):
    model = make_model(sparse)
    rows = [make_ids(length, seed=length) for length in (26, 9, 17)]
    parts = [(0, 8, 10, 26), (0, 1, 9, 9), (0, 12, 13, 17)]
    cache = model.init_cache(3, 37)
    address = cache[0].k.data_ptr()
    seen: list[list[Tensor]] = [[], [], []]
    for step in range(3):
        ids, mask = pad([row[cut[step] : cut[step + 1]] for row, cut in zip(rows, parts, strict=True)], side)
        logits, returned = model(ids, cache=cache, return_cache=True, mask=mask)
        assert returned is cache
        for row in range(3):
            seen[row].append(logits[row][mask[row]])
        assert logits.isfinite().all()
    last = make_ids(3, 1)
    final = model(last, cache=cache)
    assert cache[0].k.data_ptr() == address
    assert cache.lengths.tolist() == [27, 10, 18]
    for row in range(3):
        alone = model(torch.cat((rows[row], last[row]))[None])[0]
        assert_near(torch.cat((*seen[row], final[row])), alone)


@KINDS
@pytest.mark.parametrize('side', ['left', 'right'])
def test_padded_rows_equal_rows_alone(sparse, side):
    model = make_model(sparse)
    rows = [make_ids(length, seed=length) for length in (26, 9, 1)]
    ids, mask = pad(rows, side)
    logits = model(ids, mask=mask)
    losses = [F.cross_entropy(model(row[None])[0, :-1], row[1:], reduction='sum') for row in rows[:2]]
    assert_near(model(ids, return_loss=True, mask=mask), sum(losses, torch.tensor(0.0)) / (25 + 8))
    for row in range(3):
        assert_near(logits[row][mask[row]], model(rows[row][None])[0])


@KINDS
def test_packed_sequences_equal_sequences_alone(sparse):
    model, ids = make_model(sparse), make_ids(1, 40)
    cu_seqlens = torch.tensor([0, 11, 11, 12, 37], dtype=torch.int32)
    logits = model(ids, cu_seqlens=cu_seqlens)
    parts = [ids[:, 0:11], ids[:, 11:12], ids[:, 12:37]]
    assert_near(logits[:, :37], torch.cat([model(part) for part in parts], dim=1))
    losses = [F.cross_entropy(model(part)[0, :-1], part[0, 1:], reduction='sum') for part in parts]
    expected = sum(losses, torch.tensor(0.0)) / (10 + 0 + 24)
    assert_near(model(ids, return_loss=True, cu_seqlens=cu_seqlens), expected)
    whole = torch.tensor([0, 40], dtype=torch.int32)
    assert_near(model(ids, return_loss=True, cu_seqlens=whole), model(ids, return_loss=True))


@KINDS
def test_loss_is_the_mean_cross_entropy(sparse):
    model, ids = make_model(sparse), make_ids(2, 19)
    log_probs = model(ids[:, :-1]).log_softmax(-1)
    expected = -torch.stack([log_probs[b, t, ids[b, t + 1]] for b in range(2) for t in range(18)]).mean()
    assert_near(model(ids, return_loss=True), expected)
    assert_near(model(ids.int(), return_loss=True), expected)
    assert model.bfloat16()(ids, return_loss=True).dtype == torch.float32


def test_loss_of_nothing_is_zero():
    model = make_model(False)
    assert model(make_ids(2, 4), return_loss=True, mask=torch.zeros(2, 4, dtype=torch.bool)) == 0


@KINDS
def test_model_that_is_not_causal(sparse):
    model = make_model(sparse, causal=False)
    rows = [make_ids(14), make_ids(6)]
    ids, mask = pad(rows, 'left')
    logits = model(ids, mask=mask)
    for row in range(2):
        assert_near(logits[row][mask[row]], model(rows[row][None])[0])
    for call in (
        lambda: model.generate(rows[0][None], 2),
        lambda: model.sample(rows[0][None], 20),
        lambda: model(rows[0][None], return_cache=True),
        lambda: model.init_cache(1, 8),
    ):
        with pytest.raises(ValueError, match='causal is False'):
            call()


@KINDS
def test_a_full_cache_refuses_before_anything_is_written(sparse):
    model, ids = make_model(sparse), make_ids(2, 9)
    cache = model.init_cache(2, 10)
    model(ids, cache=cache)
    before = [layer.k.clone() for layer in cache]
    with pytest.raises(ValueError, match='10'):
        model(ids[:, :2], cache=cache)
    assert cache.lengths.tolist() == [9, 9]
    assert all(torch.equal(layer.k, kept) for layer, kept in zip(cache, before, strict=True))


@KINDS
def test_cache_is_cropped_reordered_and_reset(sparse):
    model, ids = make_model(sparse), make_ids(2, 16)
    cache = model.init_cache(2, 24)
    model(ids, cache=cache)
    cache.crop(12)
    cache.reorder(torch.tensor([1, 1]))
    assert_near(model(ids[[1, 1], 12:], cache=cache), model(ids)[[1, 1], 12:])
    cache.reset()
    assert_near(model(ids, cache=cache), model(ids))


def test_the_backend_of_a_call_reaches_wrapped_layers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, ids = make_model(True), make_ids(1, 20)
    expected, seen = model(ids, backend='eager'), []
    block: Any
    for block in model.blocks:
        attend = block.attention.forward

        def forward(*args: Any, attend: Any = attend, **options: Any) -> Any:
            seen.append(options.get('backend'))
            return attend(*args, **options)

        block.attention.forward = forward
        block.attention = checkpoint_wrapper(block.attention)
    assert_near(model(ids, backend='eager'), expected)
    assert seen == ['eager'] * len(model.blocks)


def test_call_errors():
    model, ids = make_model(False), make_ids(2, 5)
    deeper = make_model(False, depth=3).init_cache(2, 8)
    ids_list: Any = [[1, 2]]
    no_cache: Any = None
    for call, message in [
        (lambda: model(ids_list), 'ids is a list, but must be a tensor'),
        (lambda: model(ids, mask=[[True] * 5] * 2), 'mask is a list, but must be a tensor'),
        (lambda: model(ids, return_loss=1), 'return_loss is 1, but must be True or False'),
        (lambda: model(ids, return_cache='no'), "return_cache is 'no', but must be True or False"),
        (lambda: model(ids, backend='fast'), "backend is 'fast', but must be one of"),
        (lambda: model(ids[:1], return_loss=True, cu_seqlens=[0, 5]), 'cu_seqlens is a list, but must be a tensor'),
        (lambda: model.prefill(ids_list, model.init_cache(1, 8)), 'ids is a list, but must be a tensor'),
        (lambda: model.prefill(ids, no_cache), 'cache is a NoneType, but must be a ModelCache'),
        (
            lambda: model.prefill(ids - 30, model.init_cache(2, 8)),
            r'ids lies in \[-\d+, -\d+\], but must lie in \[0, 28\]',
        ),
        (lambda: model(ids[0]), r'ids has shape \(5,\)'),
        (lambda: model(ids.float()), 'float'),
        (lambda: model(ids[:, :1], return_loss=True), 'ids has 1 tokens'),
        (lambda: model(ids, return_loss=True, return_cache=True), 'return_loss is True'),
        (lambda: model(ids, cache=deeper), 'cache has 3 layers, but the model has 2'),
        (lambda: model(ids, cache=deeper[0]), 'cache is a LayerCache, but must be a ModelCache'),
        (lambda: model(ids, mask=torch.ones(2, 5)), 'mask has shape'),
        (lambda: model(ids, mask=torch.ones(2, 4, dtype=torch.bool)), 'mask has shape'),
        (lambda: model(ids, return_cache=True, cu_seqlens=torch.tensor([0, 5], dtype=torch.int32)), 'cu_seqlens'),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize('name', ['num_tokens', 'dim', 'depth', 'heads', 'dim_head'])
@KINDS
def test_size_errors(name, sparse):
    sizes: dict[str, Any] = {'num_tokens': 8, 'dim': 8, 'depth': 1, 'heads': 2, 'dim_head': 4}
    with pytest.raises(ValueError, match=f'{name} is 0'):
        Transformer(**dict(sizes, **{name: 0}), use_sparse_attn=sparse)


FLAGS = ['use_sparse_attn', 'causal', 'tie_embeddings']


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('dim', '8'),
        *(('ff_expansion_factor', value) for value in (0, 0.1, -1, 'a', None, float('nan'), float('inf'))),
        ('backend', 'fast'),
        *(('sparse_attn_kwargs', value) for value in (None, [], 'norm')),
        *((name, 'no') for name in FLAGS),
    ],
)
def test_setting_errors(name, value):
    with pytest.raises(ValueError, match=re.escape(f'{name} is {value!r}, but must be')):
        Transformer(**{'num_tokens': 8, 'dim': 8, 'depth': 1, name: value})


@KINDS
@pytest.mark.parametrize('name', ['num_selected_block', 'heads', 'backend'])
def test_settings_of_attention_that_are_none(name, sparse):
    with pytest.raises(ValueError, match=f"sparse_attn_kwargs has '{name}', but must have arguments of"):
        Transformer(8, 8, 1, use_sparse_attn=sparse, sparse_attn_kwargs={**SPARSE, name: 4})

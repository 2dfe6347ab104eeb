"""The `Transformer` and the flags of `integrations.lucidrains`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import native_sparse_attention
from native_sparse_attention.inference.model_cache import ModelCache
from native_sparse_attention.integrations.lucidrains import SparseAttention, Transformer
from tests.layer.test_migration import README, sparse_attentions, trainer_model

# Two blocks are forced in these settings, and 0.2.3 selected two more.
pytestmark = pytest.mark.filterwarnings('ignore:.*num_selected_blocks:UserWarning')


def test_arguments_of_the_transformer_by_position():
    kwargs = dict(zip(list(README)[3:], (4, 4, 2, 4, 5), strict=True))
    model = Transformer(16, 32, 2, 8, 4, 2, 2.0, True, True, False, False, False, kwargs)
    assert model.get_parameter('layers.1.feed_forward.1.weight').shape == (64, 32)
    attn = sparse_attentions(model)[1]
    assert (attn.kv_heads, attn.sliding_window_size, attn.num_selected_blocks) == (2, 4, 5)


@pytest.mark.parametrize(
    ('flags', 'backend'),
    [
        ({'use_flex_sliding_window': True}, 'flex'),
        ({'use_flex_fine_selection': True}, 'flex'),
        ({'use_triton_fine_selection': True}, 'auto'),
        ({'use_triton_fine_selection': True, 'use_flex_sliding_window': True}, 'auto'),
    ],
)
def test_flags_become_a_backend(flags, backend):
    with pytest.warns(DeprecationWarning, match=f'{next(iter(flags))}.*backend={backend!r}') as caught:
        model = Transformer(16, 32, 2, 8, 4, use_sparse_attn=True, **flags)
    assert caught[0].filename == __file__
    assert len(caught) == 1
    assert [attn.backend for attn in sparse_attentions(model)] == [backend] * 2


def test_flags_that_are_off_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Transformer(16, 32, 1, 8, 4, use_sparse_attn=True, use_flex_sliding_window=False)


def test_flags_that_contradict():
    with pytest.raises(ValueError, match='use_flex_fine_selection and use_triton_fine_selection'):
        trainer_model(use_flex_fine_selection=True, use_triton_fine_selection=True)
    with pytest.raises(ValueError, match="backend is 'eager', but use_flex_sliding_window asks for 'flex'"):
        trainer_model(use_flex_sliding_window=True, backend='eager')


def test_flags_of_a_call_of_the_model():
    model, ids = Transformer(16, 32, 2, 8, 4, use_sparse_attn=True).eval(), torch.randint(16, (1, 20))
    for flag in ('disable_flex', 'disable_triton_kernel'):
        with pytest.warns(DeprecationWarning, match=f"{flag} is deprecated: use backend='eager'") as caught:
            logits, cache = model(ids, return_cache=True, **{flag: True})
        assert caught[0].filename == __file__
        assert (len(caught), len(cache)) == (1, 2)
        torch.testing.assert_close(logits, model(ids))
    with pytest.raises(ValueError, match="disable_flex is 'no', but must be True or False"):
        model(ids, disable_flex='no')


@pytest.mark.parametrize(
    ('backend', 'flag', 'taken'),
    [
        ('auto', 'disable_flex', 'eager'),
        ('auto', 'disable_triton_kernel', 'eager'),
        ('flex', 'disable_flex', 'eager'),
        ('flex', 'disable_triton_kernel', 'flex'),
        ('triton', 'disable_flex', 'triton'),
        ('triton', 'disable_triton_kernel', 'eager'),
    ],
)
@pytest.mark.filterwarnings('ignore:disable_:DeprecationWarning')
def test_the_backend_that_a_call_takes(backend, flag, taken, monkeypatch):
    model, seen = Transformer(16, 32, 2, 8, 4, use_sparse_attn=True, backend=backend), []
    attend = native_sparse_attention.SparseAttention._attend_whole
    monkeypatch.setattr(
        native_sparse_attention.SparseAttention,
        '_attend_whole',
        lambda self, x, order, cu_seqlens, backend, loss: (
            seen.append(backend) or attend(self, x, order, cu_seqlens, 'eager', loss)
        ),
    )
    model(torch.randint(16, (1, 20)), **{flag: True})
    assert seen == [taken] * 2


def test_a_warning_names_the_line_outside_of_a_subclass():
    settings: dict[str, Any] = README | {'dim': 32, 'dim_head': 8, 'heads': 4}

    class Mine(SparseAttention):
        def __init__(self, **others: Any) -> None:
            super().__init__(**others)

        def forward(self, inp: Any, **options: Any) -> Any:
            return super().forward(inp, **options)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Mine(**settings, use_triton_kernel=False)

    def construct() -> Mine:
        return Mine(**settings, use_triton_kernel=False)

    def call(layer: Mine) -> None:
        layer(torch.randn(1, 9, 32), disable_triton_kernel=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        call(construct())
        Block()
    lines = {function: function.__code__.co_firstlineno for function in (construct, call, Block.__init__)}
    in_block = lines[Block.__init__] + 2
    assert [(warning.category, warning.lineno) for warning in caught] == [
        (DeprecationWarning, lines[construct] + 1),
        (UserWarning, lines[construct] + 1),
        (DeprecationWarning, lines[call] + 1),
        (DeprecationWarning, in_block),
        (UserWarning, in_block),
    ]
    assert {warning.filename for warning in caught} == {__file__}


def test_a_compiled_call_takes_a_flag():
    torch.compiler.reset()
    settings: dict[str, Any] = README | {'dim': 32, 'dim_head': 8, 'heads': 4}
    layer = SparseAttention(**settings)
    x = torch.randn(1, 9, 32)
    compiled = torch.compile(layer, backend='eager', fullgraph=True)
    torch.testing.assert_close(compiled(x, disable_triton_kernel=True), layer(x))


def test_flags_of_a_layer():
    settings: dict[str, Any] = README | {'dim': 32, 'dim_head': 8, 'heads': 4, 'num_selected_blocks': 6}
    for flag, backend in ((True, 'auto'), (False, 'eager')):
        with pytest.warns(DeprecationWarning, match=f'use_triton_kernel.*backend={backend!r}') as caught:
            layer = SparseAttention(**settings, use_triton_kernel=flag)
        assert caught[0].filename == __file__
        assert (len(caught), layer.backend) == (1, backend)
    x = torch.randn(1, 9, 32)
    layer = SparseAttention(**settings)
    with pytest.warns(DeprecationWarning, match='disable_triton_kernel') as caught:
        attended = layer(x, disable_triton_kernel=True)
    assert caught[0].filename == __file__
    assert torch.equal(attended, layer(x))
    for name in ('sliding_window_flex_mask', 'fine_selection_flex_mask'):
        with pytest.raises(ValueError, match=f"^{name} is given, but must be None: backend='flex' makes its own"):
            layer(x, **{name: object()})
    with pytest.raises(ValueError, match="use_triton_kernel is 'no', but must be True or False"):
        SparseAttention(**settings, use_triton_kernel='no')  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use_triton_kernel and backend='flex' are given"):
        SparseAttention(**settings, use_triton_kernel=True, backend='flex')


def test_further_arguments_are_taken_by_name():
    settings: dict[str, Any] = README | {'dim': 32, 'dim_head': 8, 'heads': 4}
    layer, x = SparseAttention(**settings, softcap=5.0), torch.randn(1, 9, 32)
    assert layer.softcap == 5.0
    mask = torch.arange(9)[None] < 7
    torch.testing.assert_close(layer(x, mask=mask)[:, :7], layer(x[:, :7]))
    model = Transformer(16, 32, 1, 8, 4, tie_embeddings=True)
    assert model.is_tied
    assert model(torch.randint(16, (1, 9)), last_only=True).shape == (1, 16)


def test_a_cache_with_all_ids():
    """The loop of 0.2.3 passes all ids so far; a new id alone does as well."""
    model, ids = Transformer(16, 32, 2, 8, 4, use_sparse_attn=True).eval(), torch.randint(16, (2, 12))
    expected = model(ids)
    for first in (0, 5):
        logits, cache = model(ids[:, :5], return_cache=True)
        steps = [logits]
        for length in range(6, 13):
            logits, cache = model(ids[:, first and length - 1 : length], cache=cache, return_cache=True)
            steps.append(logits)
        torch.testing.assert_close(torch.cat(steps, dim=1), expected)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :3] = False
    logits, cache = model(ids[:, :5], mask=mask[:, :5], return_cache=True)
    masked, cache = model(ids, mask=mask, cache=cache, return_cache=True)
    torch.testing.assert_close(masked[1], expected[1, 5:])
    torch.testing.assert_close(masked[0], model(ids[:1, 3:])[0, 2:])
    with pytest.raises(ValueError, match='ids has 5 tokens per row, but must have 1 or more than the 12 in the cache'):
        model(ids[:, :5], cache=cache, return_cache=True)
    wrong: Any = cache[0]
    with pytest.raises(ValueError, match='cache is a LayerCache, but must be a ModelCache'):
        model(ids, cache=wrong, return_cache=True)
    assert isinstance(cache, ModelCache)

"""Segment ids as borders of packed sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from native_sparse_attention.core.segments import cu_seqlens_of, mask_outputs


def queries(seqlen: int, batch: int = 1, device: torch.device | str = 'cpu') -> Tensor:
    return torch.randn(batch, seqlen, 2, 4, device=device)


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ('ids', 'borders'),
    [
        ([], [0, 0]),
        ([5], [0, 1]),
        ([3, 3, 3], [0, 3]),
        ([0, 0, 1, 2, 2], [0, 2, 3, 5]),
        ([1, 1, 0, 1], [0, 2, 3, 4]),  # an id that returns starts another sequence
        ([-1, 4, 4, -1, -2, -2], [0, 1, 3, 4, 6]),
    ],
)
def test_runs_of_equal_ids(ids: list[int], borders: list[int], dtype: torch.dtype, device: torch.device):
    segment_ids = torch.tensor([ids], dtype=dtype, device=device)
    cu_seqlens, padding = cu_seqlens_of(segment_ids, queries(len(ids), device=device))
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.device == segment_ids.device
    assert cu_seqlens.tolist() == borders
    if any(number < 0 for number in ids):
        assert padding is not None
        assert padding.tolist() == [[number < 0 for number in ids]]
    else:
        assert padding is None


def test_ids_with_strides():
    segment_ids = torch.tensor([[0, 9, 0, 9, 1, 9]])[:, ::2]
    assert cu_seqlens_of(segment_ids, queries(3))[0].tolist() == [0, 2, 3]


def test_padding_gives_nothing_and_gets_no_gradient():
    out = torch.randn(1, 3, 2, 4)
    out[:, 1] = torch.nan
    out.requires_grad_()
    lse = torch.randn(1, 2, 3, requires_grad=True)
    padding = torch.tensor([[False, True, False]])
    masked, masked_lse = mask_outputs(out, lse, padding)
    assert (masked[:, 1] == 0).all()
    assert (masked_lse[:, :, 1] == -torch.inf).all()
    torch.testing.assert_close(masked[:, ::2], out[:, ::2])
    torch.testing.assert_close(masked_lse[:, :, ::2], lse[:, :, ::2])
    (masked.sum() + masked_lse[:, :, ::2].sum()).backward()
    assert out.grad is not None
    assert (out.grad[:, 1] == 0).all()
    assert (out.grad[:, ::2] == 1).all()
    assert lse.grad is not None
    assert (lse.grad[:, :, 1] == 0).all()


def test_without_padding_nothing_is_copied():
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    masked, masked_lse = mask_outputs(out, lse, None)
    assert masked is out
    assert masked_lse is lse


@pytest.mark.parametrize(
    ('segment_ids', 'batch', 'message'),
    [
        (torch.zeros(1, 4), 1, r'segment_ids has dtype torch.float32, but must be int32 or int64'),
        (torch.zeros(1, 4, dtype=torch.bool), 1, r'segment_ids has dtype torch.bool, but must be int32 or int64'),
        (torch.zeros(1, 5, dtype=torch.int32), 1, r'segment_ids has shape \(1, 5\), but must have \(1, 4\)'),
        (torch.zeros(4, dtype=torch.int32), 1, r'segment_ids has shape \(4,\), but must have \(1, 4\)'),
        (torch.zeros(2, 4, dtype=torch.int32), 2, r'q has batch size 2, but must have 1 where segment_ids is given'),
        (torch.zeros(1, 4, dtype=torch.int32, device='meta'), 1, r'segment_ids is on meta, but q is on cpu'),
    ],
)
def test_wrong_packing(segment_ids: Tensor, batch: int, message: str):
    with pytest.raises(ValueError, match=message) as error:
        cu_seqlens_of(segment_ids, queries(4, batch))
    assert '\n' not in str(error.value)


@pytest.mark.gpu
def test_a_graph_that_is_captured():
    segment_ids = torch.zeros(1, 4, dtype=torch.int32, device='cuda')
    q = queries(4, device='cuda')
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(ValueError, match=r'segment_ids is given .* give cu_seqlens instead'):
            cu_seqlens_of(segment_ids, q)
        q.add_(1)

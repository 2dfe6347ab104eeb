"""Input makers and error rules for tests and benchmarks of attention kernels.

The oracle is the eager backend in float64. Shapes and letters are those of the ops: queries `[B, T, HQ, D]`, keys
`[B, S, H, D]`, values `[B, S, H, DV]`, block indices `[B, T, H or HQ, n]`, packed sequences `[1, total, H, D]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ('contiguous', 'sliced', 'transposed', 'expanded')
INDEX_KINDS = ('valid', 'unordered', 'duplicates', 'junk', 'none')

# The largest ||error|| of a row, relative to ||gold|| + 0.01 * mean ||gold||. The limit of bfloat16 is about six times
# the worst row of eager, over outputs and gradients of all ops on normal inputs of up to 1,500 tokens. Those of the
# other dtypes leave as much room: their worst rows are 2^-10.6 and 2^-16.8 (measured by tests/tools/test_testing.py).
ROW_LIMITS = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 2.0**-14}
# Upper bound of rule 3, whatever the error of eager's worst row: a missing row has an error of 1.
MAX_ROW_LIMIT = 2.0**-3
# The largest ||error|| / ||gold|| of a result.
NORM_LIMITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}
# With fewer rows, chance moves the mean error by more than rule 2 allows on a GPU, where the order of sums differs. The
# elements of a row do not count: they share the rounding of its weights.
MIN_ROWS = 8


@dataclass(frozen=True)
class Errors:
    """Measured and allowed errors of a result, over the values that are finite in the gold.

    Attributes:
        max: maximum error (rule 1).
        max_allowed: limit of rule 1.
        mean: mean error (rule 2).
        mean_allowed: limit of rule 2.
        row: largest relative error of a row (rule 3).
        row_allowed: limit of rule 3.
        norm: relative error of the whole (rule 5).
        norm_allowed: limit of rule 5.
        misplaced: number of values that are finite where the gold is not, or the other way round (rule 4).
    """

    max: float
    max_allowed: float
    mean: float
    mean_allowed: float
    row: float
    row_allowed: float
    norm: float
    norm_allowed: float
    misplaced: int

    def broken_rules(self) -> list[str]:
        """Return one line for each broken rule; empty where all rules hold."""
        broken = []
        if self.misplaced:
            broken.append(f'rule 4: {self.misplaced} values are finite where the gold is not, or the other way round')
        # NaN breaks a rule too.
        if not self.max <= self.max_allowed:
            broken.append(f'rule 1: max error is {self.max:.3e}, but at most {self.max_allowed:.3e} is allowed')
        if not self.mean <= self.mean_allowed:
            broken.append(f'rule 2: mean error is {self.mean:.3e}, but at most {self.mean_allowed:.3e} is allowed')
        if not self.row <= self.row_allowed:
            broken.append(f'rule 3: a row has error {self.row:.3e}, but at most {self.row_allowed:.3e} is allowed')
        if not self.norm <= self.norm_allowed:
            broken.append(f'rule 5: its norm has error {self.norm:.3e}, but at most {self.norm_allowed:.3e} is allowed')
        return broken


def assert_matches(
    result: Tensor, gold: Tensor, same_dtype: Tensor, *, name: str, row_dims: int = 1, dtype: torch.dtype | None = None
) -> None:
    """Raise an AssertionError unless a result passes the five error rules.

    1. Its maximum error is at most twice that of eager in the same dtype, plus a rounding term (FlashAttention's rule).
    2. Its mean error is at most 1.1 times that of eager in the same dtype for half types, 10 times for float32
       (FlexAttention's rule).
    3. In every row ||error|| / (||gold|| + 0.01 * mean ||gold||) is within the limit of the dtype. In float16 and
       float32 it may also be twice that of eager's worst row, up to 2^-3, which rows near 0 need.
    4. Non-finite values stand where the gold has the same ones, and nowhere else.
    5. ||error|| / ||gold|| of the whole is within the limit of the dtype: in float32 1e-5.

    On a GPU rules 1 and 2 apply to half types, and rule 2 to results of at least MIN_ROWS rows: there eager's float32
    products are exact where a row has one key, and no kernel can match that.

    A gold that is zero except for its own rounding has no relative error and cannot be checked. An example is the
    gradient of q where every query reads one key.

    Args:
        result: an output or a gradient in bfloat16, float16 or float32, of any shape.
        gold: float64, the same from eager in float64.
        same_dtype: the same from eager in the dtype of result.
        name: name of the result in messages.
        row_dims: number of trailing dimensions that form a row: 1 for the vector of a head, 0 for a log-sum-exp.
        dtype: dtype whose factor (rule 2) and limit (rule 3) apply; default that of result. float32 gradients of
            tensors that meet half tensors, such as gates and block_scale, carry the roundings of the half type.

    Raises:
        AssertionError: names the broken rules with measured and allowed numbers.
    """
    broken = measure_errors(result, gold, same_dtype, row_dims=row_dims, dtype=dtype).broken_rules()
    if broken:
        raise AssertionError('\n  '.join([f'{name} {tuple(result.shape)} {result.dtype}', *broken]))


def measure_errors(
    result: Tensor, gold: Tensor, same_dtype: Tensor, *, row_dims: int = 1, dtype: torch.dtype | None = None
) -> Errors:
    """Return the measured and allowed errors that `assert_matches` compares.

    Args:
        result: as in `assert_matches`.
        gold: as in `assert_matches`.
        same_dtype: as in `assert_matches`.
        row_dims: as in `assert_matches`.
        dtype: as in `assert_matches`.

    Raises:
        ValueError: shapes or dtypes do not fit, or same_dtype is not finite where gold is.
    """
    _check_comparable(result, gold, same_dtype)
    dtype = result.dtype if dtype is None else dtype
    finite = gold.isfinite()
    error, reference = (_error(t, gold, finite) for t in (result, same_dtype))
    if not reference.isfinite().all():
        raise ValueError(f'same_dtype is not finite where gold is: the inputs are too large for {result.dtype}')
    max_allowed = 2 * _largest(reference) + rounding_term(gold, result.dtype)
    mean_allowed = (10 if dtype == torch.float32 else 1.1) * _mean(reference)
    if result.is_cuda and dtype == torch.float32:
        max_allowed = mean_allowed = torch.inf
    rows_not_zero = (gold.flatten(-row_dims).any(-1) if row_dims else gold).count_nonzero()
    if result.is_cuda and rows_not_zero < MIN_ROWS:
        mean_allowed = torch.inf
    is_same = (result.double() == gold) | (result.isnan() & gold.isnan())
    row, eager_row = (_largest(row_errors(t, gold, row_dims=row_dims)) for t in (result, same_dtype))
    row_allowed = ROW_LIMITS[dtype]
    if dtype != torch.bfloat16:
        row_allowed = max(row_allowed, min(2 * eager_row, MAX_ROW_LIMIT))
    return Errors(
        max=_largest(error),
        max_allowed=max_allowed,
        mean=_mean(error),
        mean_allowed=mean_allowed,
        row=row,
        row_allowed=row_allowed,
        norm=float(error.norm() / gold.masked_fill(~finite, 0).norm()) if error.any() else 0.0,
        norm_allowed=NORM_LIMITS[dtype],
        misplaced=int((~torch.where(finite, result.isfinite(), is_same)).sum()),
    )


def rounding_term(gold: Tensor, dtype: torch.dtype) -> float:
    """Return the rounding term of rule 1, 2 * max |(x + 0.3) - 0.3 - x|.

    Args:
        gold: its finite values, rounded to dtype, are x.
        dtype: dtype of the result that is checked.
    """
    x = gold.masked_fill(~gold.isfinite(), 0).to(dtype)
    return 2 * _largest((x + 0.3) - 0.3 - x)


def row_errors(result: Tensor, gold: Tensor, *, row_dims: int = 1) -> Tensor:
    """Return the relative error of every row in float64, over the finite values of gold.

    It is ||error|| / (||gold|| + 0.01 * mean ||gold||).

    Args:
        result: a tensor of any dtype.
        gold: float64 of the same shape.
        row_dims: number of trailing dimensions that form a row.
    """
    finite = gold.isfinite()
    error = _norms(_error(result, gold, finite), row_dims)
    norm = _norms(gold.masked_fill(~finite, 0), row_dims)
    relative = error / (norm + 0.01 * norm.mean())
    return relative.masked_fill(error == 0, 0)


def outputs_and_gradients(
    function: Callable[..., Any], tensors: Mapping[str, Tensor], grad_outputs: list[Tensor] | None = None
) -> dict[str, Tensor]:
    """Run a function forward and backward, and return its outputs and gradients by name.

    Args:
        function: called with tensors by name; returns a tensor or several.
        tensors: arguments; floating ones are differentiated.
        grad_outputs: gradients of the outputs, one each, of any dtype; default ones. Those of outputs without a
            gradient are ignored.

    Returns:
        Outputs as 'out0', 'out1', …, and gradients as 'grad of q'; zeros where a tensor has no gradient.
    """
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    outputs = function(**leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    grads = [torch.ones_like(t) for t in outputs] if grad_outputs is None else grad_outputs
    pairs = [(t, grad.to(t.dtype)) for t, grad in zip(outputs, grads, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])
    results = {f'out{i}': t.detach() for i, t in enumerate(outputs)}
    for name, leaf in leaves.items():
        if leaf.is_floating_point():
            results[f'grad of {name}'] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return results


def assert_attention_matches(
    attention: Callable[..., tuple[Tensor, Tensor]],
    tensors: Mapping[str, Tensor],
    backend: str,
    generator: torch.Generator | None = None,
    **settings: Any,
) -> None:
    """Check output, log-sum-exp and every gradient of an attention op on one backend by the error rules.

    Args:
        attention: op that returns (out, lse) and takes tensors and backend by name.
        tensors: arguments, q among them; floating ones are differentiated.
        backend: backend to check; the reference is 'eager'.
        generator: source of the gradients of both outputs, on the device of the tensors.
        **settings: further arguments of the op.

    Raises:
        AssertionError: names the result and the broken rules.
    """

    def run(dtype: torch.dtype | None, backend: str) -> dict[str, Tensor]:
        cast = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in tensors.items()}
        return outputs_and_gradients(lambda **leaves: attention(**leaves, **settings, backend=backend), cast, grads)

    with torch.no_grad():
        outputs = attention(**tensors, **settings, backend='eager')
    grads = [torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=generator) for t in outputs]
    result, same_dtype, gold = run(None, backend), run(None, 'eager'), run(torch.float64, 'eager')
    # The log-sum-exp has a row per value. The gradients of one query's block_scale cancel each other, so a row of it is
    # a row of the batch.
    row_dims = {'out1': 0, 'grad of block_scale': 3}
    dtypes = {'grad of block_scale': tensors['q'].dtype}
    for name in result:
        assert_matches(
            result[name],
            gold[name],
            same_dtype[name],
            name=f'{backend} {name}',
            row_dims=row_dims.get(name, 1),
            dtype=dtypes.get(name),
        )


def make_qkv(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = 'cpu',
    layout: str = 'contiguous',
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normally distributed q `[B, T, HQ, D]`, k `[B, S, H, D]` and v `[B, S, H, DV]`.

    With seqlen_k = C they also serve as compressed keys and values.

    Args:
        batch: B.
        seqlen_q: T.
        seqlen_k: S.
        heads: HQ.
        kv_heads: H.
        head_dim: D.
        value_dim: DV, default head_dim.
        dtype: dtype of the three tensors.
        device: device of the three tensors.
        layout: memory layout, as in `lay_out`.
        generator: source of the random numbers.
    """
    value_dim = head_dim if value_dim is None else value_dim
    shapes = (seqlen_q, heads, head_dim), (seqlen_k, kv_heads, head_dim), (seqlen_k, kv_heads, value_dim)
    q, k, v = (
        lay_out(torch.randn(batch, *shape, dtype=dtype, device=device, generator=generator), layout) for shape in shapes
    )
    return q, k, v


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor `[B, T, H, D]` with the same values in another memory layout, the last dimension contiguous.

    Args:
        tensor: `[B, T, H, D]`.
        layout: 'contiguous'; 'sliced' (a slice of a wider projection, with NaN around it); 'transposed' (stored as
            `[B, H, T, D]`); 'expanded' (row 0 for the whole batch, with stride 0).

    Raises:
        ValueError: the layout is unknown.
    """
    if layout == 'contiguous':
        return tensor.contiguous()
    if layout == 'sliced':
        width = tensor.shape[2] * tensor.shape[3]
        projection = tensor.new_full((*tensor.shape[:2], 3 * width), torch.nan)
        result = projection[..., width : 2 * width].unflatten(-1, tensor.shape[2:])
        return result.copy_(tensor)
    if layout == 'transposed':
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == 'expanded':
        return tensor[:1].contiguous().expand_as(tensor)
    raise ValueError(f'layout is {layout!r}, but must be one of {", ".join(map(repr, LAYOUTS))}')


def make_cu_seqlens(
    total: int,
    num_sequences: int,
    *,
    uncovered: int = 0,
    device: torch.device | str = 'cpu',
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return int32 `[num_sequences + 1]`, boundaries of packed sequences of random lengths.

    With three or more sequences the first and the last are empty; others may be.

    Args:
        total: number of tokens.
        num_sequences: number of sequences.
        uncovered: the last tokens, which belong to no sequence.
        device: device of the result.
        generator: source of the random numbers.
    """
    end = total - uncovered
    ends = torch.randint(0, end + 1, (num_sequences + 1,), device=device, generator=generator, dtype=torch.int32)
    ends = ends.sort().values
    ends[0], ends[-1] = 0, end
    if num_sequences >= 3:
        ends[1], ends[-2] = 0, end
    return ends


def make_block_indices(
    kind: str,
    batch: int,
    seqlen_q: int,
    index_heads: int,
    num_selected: int,
    *,
    seqlen_k: int,
    block_size: int,
    q_offset: int = 0,
    causal: bool = True,
    device: torch.device | str = 'cpu',
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return random block indices, int32 `[B, T, index_heads, n]`.

    Args:
        kind: 'valid' (as `select_blocks` returns them), 'unordered' (in any order, padding in between), 'duplicates'
            (some blocks several times), 'junk' (with indices of -1, future blocks, out of range, and the smallest and
            largest int32) or 'none' (-1 alone).
        batch: B.
        seqlen_q: T.
        index_heads: H, or HQ where heads select alone.
        num_selected: n.
        seqlen_k: S.
        block_size: l', tokens of a selection block.
        q_offset: position of the first query.
        causal: no block starts behind the query.
        device: device of the result.
        generator: source of the random numbers.

    Raises:
        ValueError: the kind is unknown.
    """
    shape = (batch, seqlen_q, index_heads, num_selected)
    if kind == 'none':
        return torch.full(shape, -1, dtype=torch.int32, device=device)
    if kind not in INDEX_KINDS:
        raise ValueError(f'kind is {kind!r}, but must be one of {", ".join(map(repr, INDEX_KINDS))}')
    num_blocks = -(-seqlen_k // block_size)
    block = torch.arange(num_blocks, device=device)
    position = q_offset + torch.arange(seqlen_q, device=device)
    allowed = block * block_size <= position[:, None, None] if causal else torch.ones_like(block, dtype=torch.bool)
    lots = torch.rand(*shape[:3], num_blocks, device=device, generator=generator).masked_fill(~allowed, -1)
    drawn = lots.topk(min(num_selected, num_blocks), -1)
    # Padding sorts behind every block.
    valid = drawn.indices.masked_fill(drawn.values < 0, num_blocks).sort(-1).values
    valid = torch.nn.functional.pad(valid, (0, num_selected - valid.shape[-1]), value=num_blocks)
    valid = valid.masked_fill(valid == num_blocks, -1).int()
    if kind == 'valid':
        return valid
    order = torch.rand(shape, device=device, generator=generator).argsort(-1)
    mixed = valid.gather(-1, order)
    if kind == 'unordered':
        return mixed
    replaced = torch.rand(shape, device=device, generator=generator) < 0.5
    if kind == 'duplicates':
        return torch.where(replaced, mixed.roll(1, -1), mixed)
    int32 = torch.iinfo(torch.int32)
    junk = torch.tensor([-1, -2, num_blocks - 1, num_blocks, seqlen_k, int32.min, int32.max], device=device)
    drawn_junk = torch.randint(0, len(junk), shape, device=device, generator=generator)
    return torch.where(replaced, junk[drawn_junk], mixed).int()


def _check_comparable(result: Tensor, gold: Tensor, same_dtype: Tensor) -> None:
    if result.dtype not in ROW_LIMITS:
        raise ValueError(f'result has dtype {result.dtype}, but must have {", ".join(map(str, ROW_LIMITS))}')
    if gold.dtype != torch.float64:
        raise ValueError(f'gold has dtype {gold.dtype}, but must have torch.float64')
    if same_dtype.dtype != result.dtype:
        raise ValueError(f'same_dtype has dtype {same_dtype.dtype}, but result has {result.dtype}')
    for name, tensor in (('gold', gold), ('same_dtype', same_dtype)):
        if tensor.shape != result.shape:
            raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but result has {tuple(result.shape)}')


def _error(tensor: Tensor, gold: Tensor, finite: Tensor) -> Tensor:
    return (tensor.double() - gold).abs().masked_fill(~finite, 0)


def _norms(tensor: Tensor, row_dims: int) -> Tensor:
    return tensor.flatten(-row_dims).norm(dim=-1) if row_dims else tensor.abs()


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _mean(tensor: Tensor) -> float:
    return float(tensor.mean()) if tensor.numel() else 0.0

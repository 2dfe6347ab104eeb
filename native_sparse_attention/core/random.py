"""Counter-based random numbers, a function of a seed and a position.

Dropout takes Philox4x32-10 (Salmon et al. 2011). It depends only on the indices of a weight, not on tiles, chunks or
their order, so the backward pass recomputes it. A few numbers per call take SplitMix64 (Steele et al. 2014): in PyTorch
it launches 17 kernels, Philox about 165.
"""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core.checks import check_device, is_int, is_number, shown

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
# As signed integers of 64 bits.
SPLIT_MIX_STEP = 0x9E3779B97F4A7C15 - 2**64
SPLIT_MIX_INVERSE_STEP = pow(SPLIT_MIX_STEP, -1, 2**64) - 2**64
SPLIT_MIX_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def keep(seed: Tensor, dropout_p: float, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Return bool: which weights dropout keeps, for batch row b, query head h, and the indices t, s of query and key.

    seed: int64 `[1]`; the others: non-negative integers, broadcastable.
    """
    return philox(seed, s, t, h, b) >= threshold(dropout_p)


def threshold(dropout_p: float) -> int:
    """Return the threshold below which 32-bit random numbers drop a weight."""
    return min(round(dropout_p * 2**32), MASK)


def philox(seed: Tensor, *counter: Tensor) -> Tensor:
    """Return the first of the four 32-bit words, as non-negative int64; `tl.philox(seed, *counter)[0]` in Triton.

    seed: int64, whose low and high halves are the key. counter: four 32-bit integers, broadcastable.
    """
    c0, c1, c2, c3 = (word.long() for word in counter)
    keys = [seed & MASK, (seed >> 32) & MASK]
    for _ in range(ROUNDS):
        # A product of 64 bits wraps around in int64, which leaves its bits as they are.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = _high(product1) ^ c1 ^ keys[0], _high(product0) ^ c3 ^ keys[1]
        c1, c3 = product1 & MASK, product0 & MASK
        keys = [(key + step) & MASK for key, step in zip(keys, KEY_STEPS, strict=True)]
    return c0


def split_mix(seed: Tensor, counter: Tensor) -> Tensor:
    """Return the upper 32 bits of the numbers that SplitMix64 gives after `counter` others, as non-negative int64.

    seed: int64 `[1]`. counter: int64, non-negative.
    """
    # Products and sums of 64 bits wrap around in int64. A shift copies the sign, which the mask removes. The seed comes
    # before the product: TorchInductor computes products of indices alone without wrapping around, and then fails.
    state = (counter + 1 + seed * SPLIT_MIX_INVERSE_STEP) * SPLIT_MIX_STEP
    for shift, multiplier in SPLIT_MIX_ROUNDS:
        state = (state ^ ((state >> shift) & (2 ** (64 - shift) - 1))) * multiplier
    return _high(state ^ ((state >> 31) & (2**33 - 1)))


def as_seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """Return the seed as int64 `[1]` on the device; None draws one from the device's generator, without a
    synchronisation.
    """
    if isinstance(seed, torch.Tensor):
        return seed
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def check_probability(**values: float) -> None:
    for name, value in values.items():
        if not is_number(value) or not 0 <= value < 1:
            raise ValueError(f'{name} is {shown(value)}, but must be a number in [0, 1)')


def check_dropout(dropout_p: float, seed: int | Tensor | None, q: Tensor) -> None:
    check_probability(dropout_p=dropout_p)
    check_seed('dropout_seed', seed, q)


def check_seed(name: str, seed: int | Tensor | None, q: Tensor) -> None:
    if seed is None:
        return
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.shape != (1,):
            raise ValueError(
                f'{name} has dtype {seed.dtype} and shape {tuple(seed.shape)}, but must be int64 of shape (1,)'
            )
        check_device(name, seed, q)
    elif not is_int(seed) or not -(2**63) <= seed < 2**63:
        raise ValueError(
            f'{name} is {shown(seed)}, but must be an int of 64 bits, an int64 tensor of shape (1,) or None'
        )


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & MASK

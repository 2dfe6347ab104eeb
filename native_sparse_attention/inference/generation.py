"""Text generation: sampling, the decoding step that gives the next logits, and the loop over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from native_sparse_attention.core import checks, private
from native_sparse_attention.inference.model_cache import ModelCache, check_model_cache
from native_sparse_attention.inference.rollback import can_retract, retract

SEEDS = 2**32  # the CPU generator of PyTorch uses 32 bits of a seed
WORD_BITS = 30  # of a random word; a draw takes two, and products of two words fit into int64
# Steps between two looks at whether every row has stopped: looking waits for the device.
STOP_CHECK = 16


class DecodingModel(Protocol):
    """The calls of a model that `DecodeStep` uses; `Transformer` has them."""

    def __call__(self, ids: Tensor, *, cache: ModelCache) -> Tensor: ...

    def decodes_fixed(self, cache: ModelCache, num_tokens: int) -> bool: ...


class DecodeStep:
    """Decode the same number of new tokens for every row, repeatedly, through a CUDA graph where that is possible.

    `step(ids)` equals `model(ids, cache=cache)` without gradients: ids int `[B, num_tokens]` to logits `[B, num_tokens,
    V]`, and the cache advances. Where the model `decodes_fixed`, the first call runs without a graph and the second one
    captures it. The second and all later calls replay the graph, at any length of any row: one launch instead of
    hundreds, with the same bits. The logits then lie in one tensor that the next call overwrites. The cache may be
    cropped, reordered and reset between calls.

    Without a graph every step calls the model and its blocks as modules, so that hooks run and sharded weights are
    gathered. A graph reads weights and cache at the addresses of the capture, and keeps these weights alive until the
    next step, also where a model was moved to free memory; storages must not be freed in place between steps. The host
    compares the model with that of the capture while the GPU replays. Where weights lie elsewhere (after
    `load_state_dict(assign=True)`, a move or a cast), a module was replaced or a hook was added, the step is taken back
    and runs without the graph. The next call captures anew, unless the model has hooks. The graph keeps the evaluation
    mode and the autocast state of the capture.

    After `apply_tp` over NCCL the graph has the collectives of the step too: all ranks make the same calls, and change
    the model together. The graph must be gone before the process leaves the group.

    Args:
        model: `Transformer`, or a module with the same calls.
        cache: `ModelCache` of the model, which every step advances.
        num_tokens: new tokens per row and step; more than 1 for speculated tokens.
        use_graph: None: use a graph where possible; False: never; True: raise where it is not possible.

    Raises:
        ValueError: use_graph is True where a step cannot be captured. A call raises it too, where a hook was added.
    """

    def __init__(
        self, model: DecodingModel, cache: ModelCache, num_tokens: int = 1, use_graph: bool | None = None
    ) -> None:
        checks.check_positive(num_tokens=num_tokens)
        check_model_cache(cache)
        if use_graph is not None:
            checks.check_flags(use_graph=use_graph)
        self.model, self.cache, self.num_tokens, self.use_graph = model, cache, num_tokens, use_graph
        on_gpu = cache.lengths.is_cuda and not any(layer.grows for layer in cache)
        possible = on_gpu and model.decodes_fixed(cache, num_tokens)
        if not possible:
            self._check_graph_is_optional()
        self.uses_graph: bool = possible if use_graph is None else use_graph
        self._ids: Tensor | None = None
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._state: _CapturedState | None = None
        # A step that cannot be taken back is compared with the capture before it is replayed.
        self._compares_first = not all(can_retract(layer, 1, num_tokens) for layer in cache)

    def __call__(self, ids: Tensor) -> Tensor:
        """Raises ValueError for a full cache, before anything is written."""
        checks.check_tensors(ids=ids)
        expected = (self.cache.batch_size, self.num_tokens)
        if ids.shape != expected or ids.dtype not in checks.INT_DTYPES:
            raise ValueError(
                f'ids has shape {tuple(ids.shape)} and dtype {ids.dtype}, but must be int32 or int64 {expected}'
            )
        self.cache.reserve(self.num_tokens)
        if not self.uses_graph:
            return self._run(ids)
        if self._ids is None:
            # Kernels are compiled and loaded by this call, which a capture could not do.
            with torch.inference_mode(False):
                self._ids = torch.empty(expected, dtype=ids.dtype, device=ids.device)
            return self._run(ids)
        changed = self._compares_first and self._has_changed()
        if self._graph is None and not self.model.decodes_fixed(self.cache, self.num_tokens):  # a hook was added
            self._check_graph_is_optional()
            return self._run(ids)
        if changed:
            return self._run(ids)
        self._ids.copy_(ids)
        if self._graph is None:
            self._state = _CapturedState(self.model)
            # A capture runs the host's half of a step, which advances the host's bounds, and none of the device's.
            self._graph, self._logits = self._capture(self._ids)
        else:
            self.cache.advance(self.num_tokens)
        self._graph.replay()
        if not self._compares_first and self._has_changed():  # while the GPU works
            for layer in self.cache:
                retract(layer, self.num_tokens, None)
            if not self.model.decodes_fixed(self.cache, self.num_tokens):
                self._check_graph_is_optional()
            return self._run(ids)
        assert self._logits is not None
        return self._logits

    def _check_graph_is_optional(self) -> None:
        if self.use_graph:
            raise ValueError(
                f'use_graph is True, but must be None or False where a step of {self.num_tokens} tokens cannot be '
                f'captured (it can on a GPU, with a preallocated cache, where every layer has a kernel for it, no '
                f'module has hooks, and the collectives of apply_tp, if any, run over NCCL)'
            )

    def _has_changed(self) -> bool:
        """Return whether the graph is not that of the model as it is now; then drop the graph."""
        if self._state is None or not self._state.has_changed():
            return False
        if self.cache.lengths.is_cuda:
            torch.cuda.synchronize(self.cache.lengths.device)  # the graph may be running
        self._graph = self._logits = self._state = None
        return True

    @torch.no_grad()
    def _run(self, ids: Tensor) -> Tensor:
        return self.model(ids, cache=self.cache)

    def _capture(self, ids: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Autocast would hand the graph weights that were cast before it, and free them when autocast is left.
        uncached = torch.autocast(
            'cuda',
            dtype=torch.get_autocast_dtype('cuda'),
            enabled=torch.is_autocast_enabled('cuda'),
            cache_enabled=False,
        )
        bounds = [(layer.max_length, layer._peak) for layer in self.cache]
        try:
            with torch.cuda.device(ids.device), uncached, torch.cuda.graph(graph, capture_error_mode='thread_local'):
                return graph, self._run(ids)
        except RuntimeError as error:
            for layer, (max_length, peak) in zip(self.cache, bounds, strict=True):
                layer.max_length, layer._peak = max_length, peak
            raise RuntimeError(
                'the step cannot be captured, as where a network of the model reads from the device: use_graph=False'
            ) from error


class _CapturedState:
    """Where a graph reads the weights of a model, and whether the model would still make the same launches.

    The storages are kept alive, so that a replay never reads freed memory.
    """

    def __init__(self, model: Any) -> None:
        no_state = private.ModelState([], [], is_hooked=False)
        self._read = private.state_of(model) if isinstance(model, nn.Module) else lambda: no_state
        state = self._read()
        self._modules = state.modules
        self._addresses = list(map(Tensor.data_ptr, state.tensors))  # type: ignore[arg-type]
        self._storages = [t.untyped_storage() for t in state.tensors if t is not None]

    def has_changed(self) -> bool:
        # Every replayed step runs this, over hundreds of tensors and modules.
        tensors, modules, is_hooked = self._read()
        if is_hooked or len(modules) != len(self._modules) or not all(map(is_, modules, self._modules)):
            return True
        try:
            return list(map(Tensor.data_ptr, tensors)) != self._addresses  # type: ignore[arg-type]
        except (RuntimeError, TypeError):  # a tensor of a subclass, or None, stands in place of a plain one
            return True


def continue_prompt(
    out: Tensor,
    logits: Tensor,
    step: DecodeStep,
    choose: Callable[[Tensor, int], Tensor],
    *,
    stop_tokens: Tensor | None = None,
    callback: Callable[[Tensor], None] | None = None,
    progress: bool = False,
) -> Tensor:
    """Fill out `[B, N]` with what follows a prompt, and return it, or the part of it by which every row has stopped.

    logits: `[B, V]` after the prompt. choose: maps logits and the number of a step to ids `[B]`. A row that has stopped
    repeats its stop token. Raises ValueError for logits of NaN or +inf, at the latest when all tokens are drawn.
    """
    count = out.shape[1]
    finite = Finite(logits)
    check_every = STOP_CHECK if callback is None else 1  # a callback is to see no step that is not returned
    for index in _steps(count, progress):
        if index > 0:
            logits = step(out[:, index - 1 : index])[:, 0]
        tokens = choose(finite.replaced(logits), index).to(out.dtype)
        if stop_tokens is not None and index > 0:
            before = out[:, index - 1]
            tokens = torch.where(_stops(before, stop_tokens), before, tokens)
        out[:, index] = tokens
        if callback is not None:
            callback(out[:, index])
        if stop_tokens is None or (index + 1) % check_every != 0:
            continue
        finite.check()
        if bool(_stops(tokens, stop_tokens).all()):
            out = out[:, : index + 1]
            break
    finite.check()
    return out if stop_tokens is None else out[:, : _longest(out, stop_tokens)]


class Finite:
    """Whether the logits of all steps could be drawn from; kept on the device, so that a step does not wait for it."""

    def __init__(self, logits: Tensor) -> None:
        self._bad_rows = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)

    def replaced(self, logits: Tensor) -> Tensor:
        """logits `[B, V]`, with 0 in rows that have NaN, +inf or only -inf; such rows are recorded."""
        # The maximum of a row is NaN where one of its values is.
        bad = ~logits.amax(-1).isfinite()
        self._bad_rows |= bad
        return logits.masked_fill(bad[:, None], 0)

    def check(self) -> None:
        if bool(self._bad_rows.any()):
            rows = self._bad_rows.nonzero().flatten().tolist()
            raise ValueError(
                f'logits have NaN or +inf, or only -inf, in rows {rows}, so no token can be drawn from them'
            )


def _stops(tokens: Tensor, stop_tokens: Tensor) -> Tensor:
    # Unlike torch.isin, which sorts where stop tokens are many and then waits for the device.
    return (tokens[:, None] == stop_tokens).any(-1)


def _longest(tokens: Tensor, stop_tokens: Tensor) -> int:
    """Tokens of the row that stops last, its stop token included."""
    return min(tokens.shape[1], 1 + int((~torch.isin(tokens, stop_tokens)).sum(1).max()))


def _steps(count: int, progress: bool) -> Iterator[int]:
    if not progress:
        return iter(range(count))
    from tqdm import tqdm  # not needed to import the package

    return iter(tqdm(range(count), desc='generating', unit='token'))


def sampler(
    batch: int,
    count: int,
    device: torch.device,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | Sequence[int] | Tensor | None,
    generator: torch.Generator | None,
) -> Callable[[Tensor, int], Tensor]:
    """Return a function that maps logits `[B, V]` and the index of a step, below count, to ids `[B]`."""
    if not (checks.is_number(temperature) and 0 <= temperature < inf):
        raise ValueError(f'temperature is {checks.shown(temperature)}, but must be a finite number of at least 0')
    if top_k is not None:
        checks.check_positive(top_k=top_k)
    if top_p is not None and not (checks.is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f'top_p is {checks.shown(top_p)}, but must be a number in (0, 1] or None')
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f'generator is {checks.shown(generator)}, but must be a torch.Generator or None')
    if seed is not None and generator is not None:
        raise ValueError('seed and generator are given, but one must be left out')
    seeds = None if seed is None else _seeds_of_rows(seed, batch)
    if temperature == 0:
        return lambda logits, step: logits.argmax(-1)
    words = _random_words(batch, count, device, seeds, generator)
    return lambda logits, step: _draw(logits, words[:, step], temperature, top_k, top_p)


def _seeds_of_rows(seed: int | Sequence[int] | Tensor, batch: int) -> list[int]:
    given = seed.tolist() if isinstance(seed, Tensor) else seed
    if isinstance(given, Sequence):
        rows = list(given)
    elif checks.is_int(given):
        rows = [given + row for row in range(batch)]
    else:
        raise ValueError(f'seed is {given}, but must be an integer, or one for each row')
    if len(rows) != batch:
        raise ValueError(f'seed has {len(rows)} entries, but must have one for each of {batch} rows, or be an integer')
    for row in rows:
        if not checks.is_int(row) or not 0 <= row < SEEDS:
            raise ValueError(f'seed is {row} for a row, but must be an integer from 0 to {SEEDS - 1}')
    return rows


def _random_words(
    batch: int, count: int, device: torch.device, seeds: list[int] | None, generator: torch.Generator | None
) -> Tensor:
    """Return random integers of WORD_BITS bits, int64 `[batch, count, 2]`: two words per draw.

    With seeds, the words of a step depend on the step and on the row's own seed alone, on every device.
    """
    bound = 2**WORD_BITS
    if seeds is None:
        return torch.randint(bound, (batch, count, 2), device=device, generator=generator)
    # Drawn on the CPU, where the first numbers of a generator do not depend on how many are drawn at once.
    generators = [torch.Generator('cpu').manual_seed(seed) for seed in seeds]
    return torch.stack([torch.randint(bound, (count, 2), device='cpu', generator=g) for g in generators]).to(device)


def _draw(logits: Tensor, words: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Draw ids `[B]` from logits `[B, V]` by random words `[B, 2]`; a row depends on its own values alone.

    Probabilities become integers, so that their sums are exact in any order: devices without float64 draw as others
    do. Of tokens that are equally likely at the border of top_k or top_p, those of lower ids are kept.
    """
    index = None
    if top_k is not None or top_p is not None:
        logits, index = logits.sort(dim=-1, descending=True, stable=True)
        logits = logits[:, :top_k]
    probs = (_tempered(logits, temperature).softmax(-1) * 2 ** (2 * WORD_BITS)).long()
    reached = probs.cumsum(-1)
    total = reached[:, -1:]
    if top_p is not None and top_p < 1:
        least = max(1, round(top_p * 2 ** (2 * WORD_BITS)))
        kept = (reached - probs < least).sum(-1, keepdim=True)
        total = reached.gather(-1, kept - 1)
    # The token whose range of [0, total) holds the target, so one that is kept and has a probability.
    rank = (reached <= _fraction(total, words)).sum(-1, keepdim=True)
    return (rank if index is None else index.gather(-1, rank)).squeeze(-1)


def _fraction(total: Tensor, words: Tensor) -> Tensor:
    """Return floor(total * u), int64 `[B, 1]`, with u in [0, 1) of twice WORD_BITS bits: words `[B, 2]`, high first.

    total: `[B, 1]`, at most about 2 ** (2 * WORD_BITS). Products of halves fit into 63 bits.
    """
    high, low = words.split(1, dim=-1)
    total_high, total_low = total >> WORD_BITS, total & (2**WORD_BITS - 1)
    middle = total_high * low + total_low * high + (total_low * low >> WORD_BITS)
    return total_high * high + (middle >> WORD_BITS)


def gumbel_draw(logits: Tensor, temperature: float, top_k: int) -> Tensor:
    """Ids `[B]` drawn from the top_k likeliest of logits `[B, V]` by torch's own random numbers."""
    logits = _tempered(logits, temperature)
    if top_k < logits.shape[-1]:
        values, index = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, index, values)
    # The largest of logits with Gumbel noise, −log of an exponential variable, is a draw from their softmax.
    return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits / max(temperature, 1e-10)  # a smaller divisor would make logits infinite


def stop_ids(stop_tokens: int | Sequence[int] | Tensor | None, device: torch.device) -> Tensor | None:
    """The ids that end a row, on the device; None if there are none."""
    if stop_tokens is None:
        return None
    refusal = f'stop_tokens is {stop_tokens!r}, but must be an integer id or several'
    try:
        ids = torch.as_tensor(stop_tokens, device=device).flatten()
    except (TypeError, ValueError, RuntimeError) as error:  # no numbers
        raise ValueError(refusal) from error
    if ids.numel() == 0:
        return None
    if ids.dtype not in checks.INT_DTYPES:
        raise ValueError(refusal)
    return ids


def last_real(x: Tensor, mask: Tensor) -> Tensor:
    """x `[B, T, D]` at every row's last real token, `[B, D]`."""
    index = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    return x.take_along_dim(index[:, None, None], dim=1)[:, 0]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards in the mode that it was in."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True

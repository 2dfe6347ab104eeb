"""Rotary position embedding from the frequencies of a rotary-embedding-torch instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from native_sparse_attention import ops
from native_sparse_attention.core import private
from native_sparse_attention.nn.linear import set_values
from native_sparse_attention.ops.rotary import shared_input
from native_sparse_attention.ops.rotary.api import backend_of


class Rotary(nn.Module):
    """Frequencies of a rotary embedding, and the tables of angles made from them.

    A call returns the frequencies, float32 `[F]`, on a device. Fixed frequencies are neither parameters nor buffers, so
    that no cast, precision policy, sharding or offload rounds or loses them: they are a float32 tensor on the CPU, with
    a copy on the device that last asked for them. Learned ones (`learned_freq=True`) are a parameter,
    `rotary_emb.freqs`, which casts of this module leave in its dtype.

    Only the frequencies and `interpolate_factor` of the instance are used, and fixed frequencies are copied from it.
    Its own methods build positions in the dtype of the input and cache by a scalar offset; here angles are float32,
    from integer positions. State dicts hold learned frequencies only; the entry `rotary_emb.freqs` of earlier versions
    loads into fixed ones.

    Args:
        dim_head: D, the features of a head.
        rotary_emb: an instance of rotary-embedding-torch, None for its default for `dim_head`. xpos is refused.
    """

    def __init__(self, dim_head: int, rotary_emb: RotaryEmbedding | None = None) -> None:
        super().__init__()
        if rotary_emb is None:
            if dim_head < 3:
                raise ValueError(f'dim_head is {dim_head}, but a default rotary embedding needs at least 3 features')
        elif not isinstance(rotary_emb, RotaryEmbedding):
            raise ValueError(
                f'rotary_emb is a {type(rotary_emb).__name__}, but must be a RotaryEmbedding, None or False'
            )
        elif rotary_emb.use_xpos:
            raise ValueError('rotary_emb uses xpos, which scales keys by position and is not supported: use_xpos=False')
        elif 2 * len(rotary_emb.freqs) > dim_head:
            raise ValueError(
                f'rotary_emb has {len(rotary_emb.freqs)} frequencies, but heads of {dim_head} features take at most '
                f'{dim_head // 2}'
            )
        is_learned = rotary_emb is not None and (rotary_emb.learned_freq or rotary_emb.freqs.requires_grad)
        self.rotary_emb = rotary_emb if is_learned else None
        self.interpolate_factor: float = 1.0 if rotary_emb is None else rotary_emb.interpolate_factor
        if rotary_emb is None:
            start = _default_frequencies(dim_head)
        else:
            start = rotary_emb.freqs.detach().float()
            start = start.clone() if start.is_meta else start.to('cpu', copy=True)
        # Plain attributes: the first values, on the CPU, and fixed frequencies on the device that needed them last.
        self._start = self._on_device = start

    def forward(self, device: torch.device) -> Tensor:
        """The frequencies, float32 `[F]`, on the device.

        Raises ValueError for learned frequencies that a precision policy has cast to a half type, and for fixed ones
        whose values were never known (an instance made on the meta device).
        """
        if self.rotary_emb is not None:
            freqs = self.rotary_emb.freqs
            if freqs.is_meta and device.type != 'meta':
                raise ValueError(
                    'rotary_emb.freqs is on the meta device in the forward, but learned frequencies are read without a '
                    "call of their module: with accelerate's offloading pass preload_module_classes=['Rotary']"
                )
            if freqs.dtype.itemsize < 4:
                raise ValueError(
                    f'rotary_emb.freqs is {freqs.dtype} in the forward, but learned frequencies must be float32: keep '
                    'the precision policy from them, by a fully_shard unit of their own (fully_shard(layer.rotary)) or '
                    'by ignored_params'
                )
            # A copy, as sharding may free the parameter after this call.
            return freqs.float().to(device, copy=True)
        if self._on_device.device == device:
            return self._on_device
        if self._start.is_meta:
            raise ValueError(
                'rotary_emb was made on the meta device, so its frequencies have no values: make it outside of '
                "torch.device('meta'), or load a state dict that has rotary_emb.freqs"
            )
        return self._copy_to(device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles at positions `[B, T]`, float32 `[B, T, F]`, for any number of `rotate`."""
        return angle_tables(positions, self(positions.device), self.interpolate_factor)

    def reset_parameters(self) -> None:
        """Set learned frequencies to those of the instance that the constructor was given.

        Raises ValueError where that instance was made on the meta device, so that its frequencies have no values.
        """
        if self.rotary_emb is None:
            return
        if self._start.is_meta:
            raise ValueError(
                'rotary_emb was made on the meta device, so its frequencies have no values to start from: make it '
                "outside of torch.device('meta')"
            )
        set_values(self.rotary_emb.freqs, self._start)

    def extra_repr(self) -> str:
        return f'{len(self._start)} frequencies'

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {'_on_device': self._start}

    def _copy_to(self, device: torch.device) -> Tensor:
        """Fixed frequencies on the device, kept there unless that would keep a tensor of a transform or of a trace."""
        if torch.compiler.is_compiling():
            copy = self._start.to(device)
            if not torch.compiler.is_exporting():
                self._on_device = copy
            return copy
        with torch.inference_mode(False):
            copy = self._start.to(device)
        if type(copy) is Tensor and not private.is_transformed():
            self._on_device = copy
        return copy

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotary:
        if self.rotary_emb is None:
            super()._apply(fn, recurse)
            # So that neither a captured graph nor a compiled one has to copy from the CPU.
            device = fn(torch.empty(0, device=self._on_device.device)).device
            if device != self._on_device.device and not (self._start.is_meta or device.type == 'meta'):
                self._copy_to(device)
            return self
        # Casting the layer to a half type must not round the frequencies: at position 10,000 that is a wrong angle.
        freqs = self.rotary_emb.freqs.data
        super()._apply(fn, recurse)
        if self.rotary_emb.freqs.dtype != freqs.dtype:
            self.rotary_emb.freqs.data = freqs.to(self.rotary_emb.freqs.device)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if self.rotary_emb is None:
            key = prefix + _STATE_KEY
            if key in state_dict:
                *_, errors = args
                self._load_fixed(key, state_dict[key], errors)
                state_dict = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _load_fixed(self, key: str, loaded: Any, errors: list[str]) -> None:
        if loaded.shape != self._start.shape:
            errors.append(
                f'size mismatch for {key}: {tuple(loaded.shape)} in the state dict, {tuple(self._start.shape)} here'
            )
        elif not loaded.is_meta:
            loaded = (loaded.full_tensor() if hasattr(loaded, 'full_tensor') else loaded).detach().cpu()
            if self._start.is_meta:
                self._start = self._on_device = loaded.float().clone()
            # A rounded copy of the frequencies that are here says nothing new.
            elif not loaded.equal(self._start.to(loaded.dtype)):
                # In place, as captured graphs read them where they are.
                for freqs in {id(t): t for t in (self._start, self._on_device)}.values():
                    freqs.copy_(loaded)


_STATE_KEY = 'rotary_emb.freqs'


def describe_rotary(rotary: Rotary | None) -> dict[str, str | None]:
    """Return {'rotary': text}, with equal texts for equal frequencies; {} where the frequencies have no values yet."""
    if rotary is None:
        return {'rotary': None}
    start = rotary._start
    if rotary.rotary_emb is not None:
        return {'rotary': f'{len(start)} learned frequencies'}
    if start.is_meta:
        return {}
    lowest = min(start.tolist(), default=0)
    return {'rotary': f'{len(start)} frequencies from {lowest:.4g}, interpolated by {rotary.interpolate_factor:g}'}


def _default_frequencies(dim_head: int) -> Tensor:
    """Those of `RotaryEmbedding(dim_head)`, on the CPU under any default device: 10000^(-2 i / D)."""
    exponents = torch.arange(0, dim_head, 2, device='cpu')[: dim_head // 2].float() / dim_head
    return 1.0 / 10000.0**exponents


def angle_tables(positions: Tensor, freqs: Tensor, interpolate_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position / interpolate_factor * freqs, float32: positions `[B, T]`, freqs `[F]`."""
    scaled = positions if interpolate_factor == 1 else positions.float() / interpolate_factor
    angles = scaled[..., None] * freqs
    return angles.cos(), angles.sin()


def rotate(tables: tuple[Tensor, Tensor] | None, backend: str, *tensors: Tensor | None) -> list[Any]:
    """Return the tensors `[B, T, heads, D]` that are not None, rotated by tables if there are any.

    backend: of the layer; eager serves flex and learned angles.
    """
    if tables is None:
        return list(tensors)
    backend = _served_by(tables, backend)
    return [None if t is None else ops.rotary(t, *tables, backend=backend) for t in tensors]


def rotated_and_plain(
    tables: tuple[Tensor, Tensor] | None, backend: str, x: Tensor, num_rotated: int, num_plain: int = 0
) -> tuple[Tensor, ...]:
    """x rotated by tables, if there are any, for so many readers, and as it is for the others:
    `ops.rotary.shared_input`.
    """
    backend = 'eager' if backend == 'flex' else backend if tables is None else _served_by(tables, backend)
    return shared_input(x, num_plain, num_rotated, tables, backend=backend)


def recompute_rotated(x: Tensor, tables: tuple[Tensor, Tensor] | None, backend: str, rotated: Tensor) -> Any:
    """A context in which autograd saves x and tables in place of rotated, `rotate(tables, backend, x)[0]`, which the
    backward pass makes again.

    Only where the kernel turns, as the ops that go with it save what they are given; others save copies and views. Only
    where no other hooks of saved tensors are active, a checkpoint's say, since autograd calls none but the innermost.
    """
    if (
        torch.compiler.is_compiling()
        or tables is None
        or not rotated.requires_grad
        or not type(rotated) is type(x) is Tensor
        or not private.saved_tensor_hooks.is_free()
        or backend_of(x, *tables, backend=_served_by(tables, backend)).name != 'triton'
    ):
        return nullcontext()
    # Neither the hooks nor what they keep refers to rotated.
    place, again = _place(rotated), _RecomputeRotated(x, tables, backend)

    def pack(t: Tensor) -> _Saved | _RecomputeRotated:
        return again.used() if type(t) is Tensor and _place(t) == place else _Saved.of(t)

    return saved_tensors_hooks(pack, lambda saved: saved.unpacked())


class _Saved(NamedTuple):
    """A tensor, detached, as its graph may lead to what saves it; and its version, which autograd does not check where
    there are hooks.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, t: Tensor) -> _Saved:
        return cls(t.detach(), private.saved_tensor_hooks.version_of(t))

    def unpacked(self) -> Tensor:
        if torch.compiler.is_compiling():
            return self.tensor
        version = private.saved_tensor_hooks.version_of(self.tensor)
        if version != self.version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an inplace operation: '
                f'{tuple(self.tensor.shape)} is at version {version}; expected version {self.version}'
            )
        return self.tensor


class _RecomputeRotated:
    """Turned x: made by the first of those that saved it, held until the last of them has it."""

    def __init__(self, x: Tensor, tables: tuple[Tensor, Tensor], backend: str) -> None:
        self.x, self.tables, self.backend = _Saved.of(x), [_Saved.of(table) for table in tables], backend
        self.uses = self.uses_left = 0
        self.rotated: Tensor | None = None

    def used(self) -> _RecomputeRotated:
        self.uses += 1
        return self

    @torch.no_grad()
    def unpacked(self) -> Tensor:
        rotated = self.rotated
        if rotated is None:
            cos, sin = (table.unpacked() for table in self.tables)
            rotated = rotate((cos, sin), self.backend, self.x.unpacked())[0]
            self.uses_left = self.uses
        self.uses_left -= 1
        self.rotated = rotated if self.uses_left > 0 else None
        return rotated


def _served_by(tables: tuple[Tensor, Tensor], backend: str) -> str:
    return 'eager' if backend == 'flex' or tables[0].requires_grad else backend


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype

"""Rotary position embedding from the frequencies of a rotary-embedding-torch instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn

from native_sparse_attention import ops
from native_sparse_attention.core import private
from native_sparse_attention.core.checks import is_readable
from native_sparse_attention.nn.linear import set_values
from native_sparse_attention.ops.rotary import shared_input
from native_sparse_attention.ops.rotary.api import Tables, check_layout


class Rotary(nn.Module):
    """Frequencies of a rotary embedding, and tables of the angles.

    A call returns the frequencies, float32 `[F]`, on a device. Fixed frequencies are neither parameters nor buffers, so
    that no cast, precision policy, sharding or offload changes them: they are a float32 tensor on the CPU, with a copy
    on the device of the last call. Learned ones (`learned_freq=True`) are a parameter, `rotary_emb.freqs`, which casts
    of this module leave in its dtype.

    Of the instance, only the frequencies and `interpolate_factor` are used, and fixed frequencies are copied. Angles
    are float32, from integer positions; the methods of the instance build positions in the dtype of the input. State
    dicts hold learned frequencies only; an entry `rotary_emb.freqs` loads into fixed ones.

    Args:
        dim_head: D, the features of a head.
        rotary_emb: an instance of rotary-embedding-torch, None for its default for `dim_head`. xpos is refused.
        layout: pairs of features that are rotated, 'interleaved' or 'half', as in `ops.rotary`.
    """

    def __init__(self, dim_head: int, rotary_emb: RotaryEmbedding | None = None, layout: str = 'interleaved') -> None:
        super().__init__()
        check_layout(rotary_layout=layout)
        self.layout = layout
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
        # Plain attributes: the first values, on the CPU, and fixed frequencies on the device of the last call.
        self._start = self._on_device = start

    def forward(self, device: torch.device) -> Tensor:
        """Return the frequencies, float32 `[F]`, on the device.

        Raises ValueError for learned frequencies that a precision policy has cast to a half type, and for fixed ones
        of an instance made on the meta device, which have no values.
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

    def tables(self, positions: Tensor) -> Tables:
        """Return cosines and sines of the angles at positions `[B, T]`, float32 `[B, T, F]`, for `rotate`."""
        return angle_tables(positions, self(positions.device), self.interpolate_factor)

    def reset_parameters(self) -> None:
        """Set learned frequencies to their start, the values in the instance that the constructor received.

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
        """Copy fixed frequencies to the device; keep the copy unless it belongs to a transform or a trace."""
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
            # The copy moves now: captured and compiled graphs must not copy from the CPU.
            device = fn(torch.empty(0, device=self._on_device.device)).device
            if device != self._on_device.device and not (self._start.is_meta or device.type == 'meta'):
                self._copy_to(device)
            return self

        # A cast of the layer to a half type must not round the frequencies: angles at position 10,000 would be wrong.
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)
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
            # Rounded copies of the present frequencies are ignored.
            elif not loaded.equal(self._start.to(loaded.dtype)):
                # In place, as captured graphs read these addresses.
                for freqs in {id(t): t for t in (self._start, self._on_device)}.values():
                    freqs.copy_(loaded)


_STATE_KEY = 'rotary_emb.freqs'


def make_rotary(dim_head: int, rotary_emb: Any, layout: str) -> Rotary | None:
    """Return the rotary embedding of a layer, or None where rotary_emb is False."""
    if rotary_emb is not False:
        return Rotary(dim_head, rotary_emb, layout)
    if check_layout(rotary_layout=layout):
        raise ValueError(f'rotary_layout is {layout!r}, but must be left out where rotary_emb is False')
    return None


def layout_of(rotary: Rotary | None) -> str:
    return 'interleaved' if rotary is None else rotary.layout


def describe_rotary(rotary: Rotary | None) -> dict[str, str | None]:
    """Return {'rotary': text}, with equal texts for equal frequencies; {} where the frequencies have no values yet."""
    if rotary is None:
        return {'rotary': None}
    start = rotary._start
    if rotary.rotary_emb is not None:
        return {'rotary': f'{len(start)} learned frequencies{", in halves" if rotary.layout == "half" else ""}'}
    if not is_readable(start):
        return {}
    lowest = min(start.tolist(), default=0)
    halves = ', in halves' if rotary.layout == 'half' else ''
    factor = rotary.interpolate_factor
    return {'rotary': f'{len(start)} frequencies from {lowest:.4g}, interpolated by {factor:g}{halves}'}


def _default_frequencies(dim_head: int) -> Tensor:
    """Return 10000^(-2 i / D), as `RotaryEmbedding(dim_head)` has them, on the CPU under any default device."""
    exponents = torch.arange(0, dim_head, 2, device='cpu')[: dim_head // 2].float() / dim_head
    return 1.0 / 10000.0**exponents


def angle_tables(positions: Tensor, freqs: Tensor, interpolate_factor: float = 1.0) -> Tables:
    """Return cosines and sines of position / interpolate_factor * freqs, float32; positions `[B, T]`, freqs `[F]`."""
    scaled = positions if interpolate_factor == 1 else positions.float() / interpolate_factor
    angles = scaled[..., None] * freqs
    return angles.cos(), angles.sin()


def rotate(tables: Tables | None, backend: str, *tensors: Tensor | None, layout: str = 'interleaved') -> list[Any]:
    """Return the tensors `[B, T, heads, D]`, or None, rotated by tables if there are any. backend: of the layer."""
    if tables is None:
        return list(tensors)
    backend = backend_of_op(tables, backend)
    return [None if t is None else ops.rotary(t, *tables, layout=layout, backend=backend) for t in tensors]


def rotated_and_plain(
    tables: Tables | None,
    backend: str,
    x: Tensor,
    num_rotated: int,
    num_plain: int = 0,
    layout: str = 'interleaved',
) -> tuple[Tensor, ...]:
    """Return `num_rotated` outputs of x rotated by tables, if there are any, then `num_plain` outputs equal to x.

    Their gradients are added in one pass, by `ops.rotary.shared_input`.
    """
    backend = backend_of_op(tables, backend)
    return shared_input(x, num_plain, num_rotated, tables, layout=layout, backend=backend)


def backend_of_op(tables: Tables | None, backend: str) -> str:
    """Return the backend of the rotary op: eager serves flex and learned frequencies."""
    is_learned = tables is not None and tables[0].requires_grad
    return 'eager' if backend == 'flex' or is_learned else backend

"""Saving and loading of a model: constructor arguments in config.json, weights in model.safetensors."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from native_sparse_attention.core.checks import shown
from native_sparse_attention.nn.start import StartedModel, without_draws

CONFIG, WEIGHTS = 'config.json', 'model.safetensors'
_MODEL_TYPE = 'native_sparse_attention'
_METADATA = 'state_dict'  # key in the metadata of the weights: versions of modules and settings of layers


class Arguments:
    """Constructor arguments of a model as JSON holds them, and the text of each setting of its layers that it cannot
    hold: modules, such as a network φ. names: of the weights of a new model.
    """

    names: frozenset[str] = frozenset()

    def __init__(self, arguments: Mapping[str, Any], layer_settings: str) -> None:
        settings = arguments[layer_settings]
        self.given = {name: shown(value) for name, value in settings.items() if not _is_plain(value)}
        kept = {name: value for name, value in settings.items() if name not in self.given}
        self.plain = {**arguments, layer_settings: kept}


def save(model: StartedModel, arguments: Arguments, directory: str | os.PathLike[str]) -> None:
    """Write the weights and the constructor arguments of a model. Files that exist are replaced, each as a whole."""
    safetensors = _import_safetensors()
    state = model.state_dict()
    if others := sorted(state.keys() ^ arguments.names):
        raise ValueError(
            f'the model has other weights than a new one ({others[0]}), but must have the same for from_pretrained: '
            f'merge adapters, and remove parametrisations, pruning and wrappers'
        )
    if model.is_tied:
        del state['token_emb.weight']
    for name, tensor in state.items():
        if type(tensor) is not Tensor or tensor.is_meta:
            kind = 'on the meta device' if tensor.is_meta else f'a {type(tensor).__name__}'
            raise ValueError(f'{name} is {kind}, but must be a plain tensor with values to be saved')
    weights = {name: tensor.contiguous() for name, tensor in state.items()}
    metadata = {'format': 'pt', _METADATA: json.dumps(getattr(state, '_metadata', {}))}
    config = {'model_type': _MODEL_TYPE, 'arguments': arguments.plain, 'given': arguments.given}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHTS, lambda path: safetensors.torch.save_file(weights, path, metadata))
    _replace(folder / CONFIG, lambda path: path.write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8'))


def load(build: Callable[..., StartedModel], directory: str | os.PathLike[str], changes: dict[str, Any]) -> Any:
    """Return `build(**arguments)` with the saved arguments and weights, in the dtypes of the weights.

    changes: arguments in place of saved ones; settings of layers are added to the saved ones.
    """
    safetensors = _import_safetensors()
    folder = Path(directory)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f'directory is {str(directory)!r}, but must have {CONFIG} and {WEIGHTS} of save_pretrained')
    config = json.loads((folder / CONFIG).read_text(encoding='utf-8'))
    if config.get('model_type') != _MODEL_TYPE:
        raise ValueError(f'{CONFIG} has model_type {config.get("model_type")!r}, but must have {_MODEL_TYPE!r}')
    arguments = config['arguments']
    for name, value in changes.items():
        saved = arguments.get(name)
        arguments[name] = {**saved, **value} if isinstance(saved, dict) and isinstance(value, Mapping) else value
    held = {name for value in arguments.values() if isinstance(value, Mapping) for name in value}
    for name, text in config['given'].items():
        if name not in held:
            raise ValueError(f'{name} is left out, but must be given: it was {text}, which {CONFIG} cannot hold')
    with without_draws():
        model = build(**arguments)
    state: Any = OrderedDict()
    with safetensors.safe_open(folder / WEIGHTS, 'pt') as file:
        for name in file.keys():  # noqa: SIM118 - a file is no mapping
            # A copy is aligned, where the file is not: matrix products of unaligned weights round otherwise.
            state[name] = file.get_tensor(name).clone()
        state._metadata = json.loads((file.metadata() or {}).get(_METADATA, '{}'))
    if model.is_tied:
        state.setdefault('token_emb.weight', state.get('to_logits.weight'))
    model.load_state_dict(state, assign=True)
    return model.eval()


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside path, then rename it."""
    new = path.with_name(f'{path.name}.new')
    write(new)
    new.replace(path)


def _import_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            'safetensors is not installed, but save_pretrained and from_pretrained need it: '
            'pip install native-sparse-attention[transformers]'
        ) from error
    return safetensors

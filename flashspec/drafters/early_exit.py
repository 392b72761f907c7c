"""Early exit: the target's own first layers and its head as drafter, without a weight of its own."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

_LAYER_LISTS = ("layers", "h", "blocks")  # where decoder models of transformers keep their blocks


def early_exit(model: Any, layers: int) -> Any:
    """A view of `model` that stops after `layers` layers and goes on to the final norm and head.

    The weights are shared; `model` itself, its configuration and its module names stay as they are. The view is an ordinary
    causal language model for `CachedModel`. Raises ValueError where the depth or the architecture does not allow it.
    """
    base = model.base_model
    name = next((name for name in _LAYER_LISTS if isinstance(getattr(base, name, None), nn.ModuleList)), None)
    if name is None:
        raise ValueError(f"{type(model).__name__} does not keep its layers in a list, so it has no early exit.")
    blocks = getattr(base, name)
    if not 1 <= layers < len(blocks):
        raise ValueError(
            f"Early exit after {layers} layers is not possible; choose 1 to {len(blocks) - 1} for this target."
        )
    config = copy.deepcopy(model.config)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config.num_hidden_layers = layers
    shallow_base = _shallow(base, config)
    shallow_base._modules[name] = nn.ModuleList(list(blocks)[:layers])
    view = _shallow(model, config)
    for child, module in view._modules.items():
        if module is base:
            view._modules[child] = shallow_base
    return view


def _shallow(module: Any, config: Any) -> Any:
    """A copy of the module object alone: parameters and children are the same objects, the tables naming them are new."""
    view = copy.copy(module)
    view._modules, view._parameters, view._buffers = (
        dict(module._modules),
        dict(module._parameters),
        dict(module._buffers),
    )
    view.config = config
    return view

"""Layers for models of transformers that save less and are faster, where a module is recognised by what it computes.

Names, parameters and `state_dict` stay. A module that is not recognised stays as it is.
"""

from shoal.models.huggingface.fast.swap import swap_layers

__all__ = ["swap_layers"]

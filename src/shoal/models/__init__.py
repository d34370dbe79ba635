"""The models of shoal, by name. Strings only: a model is imported when a recipe uses it. A user's own
`path/to/file.py:function` has the same rights."""

BUILDERS = {
    "llama": "shoal.models.llama:build",
    "moe": "shoal.models.moe:build",
    "resnet": "shoal.models.resnet:build",
    "mlp": "shoal.models.mlp:build",
}

SMALLER = {"llama": "shoal.models.llama_config:smaller", "moe": "shoal.models.moe_config:smaller"}
"""Model → a function from its arguments to those of a small copy with the same structure, for `shoal verify`."""

ADAPTERS = {"transformers": "shoal.models.huggingface"}
"""Package of a model's class → the module that derives the description of such models and adapts them."""

"""The models that come with shoal, by name. Strings only: nothing here is imported until a recipe asks for it, and
`path/to/file.py:function` of the user's own has the same rights."""

BUILDERS = {
    "llama": "shoal.models.llama:build",
    "moe": "shoal.models.moe:build",
    "resnet": "shoal.models.resnet:build",
    "mlp": "shoal.models.mlp:build",
}

SMALLER = {"llama": "shoal.models.llama_config:smaller", "moe": "shoal.models.moe_config:smaller"}
"""Model → a function from its arguments to those of a small copy with the same anatomy, for `shoal verify`."""

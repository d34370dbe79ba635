"""The models of shoal, by name. Strings only: a model is imported when a recipe uses it. A user's own
`path/to/file.py:function` has the same rights."""

BUILDERS = {
    "llama": "shoal.models.llama:build",
    "moe": "shoal.models.moe:build",
    "resnet": "shoal.models.resnet:build",
    "mlp": "shoal.models.mlp:build",
}

PREFIXES = {"hf:": "shoal.models.huggingface.pretrained.build:builder"}
"""First letters of a name → a function from the name to a builder."""

FOR_LOOPS = {"hf:": "shoal.models.huggingface.pretrained.from_pretrained:build"}
"""First letters of a name → a function that builds such a model for a loop of your own, without memory."""

START_FOLDERS = {"hf:": "shoal.models.huggingface.pretrained.weights:folder_to_start_from"}
"""First letters of a name → a function from the model section to the folder of its weights."""

OTHER_SECTIONS = {"hf:": "shoal.models.huggingface.pretrained.same_config:other_section"}
"""First letters of a name → a function that compares the model section of a checkpoint with a model."""

SETTINGS = {
    "llama": "shoal.models.llama_config:settings",
    "moe": "shoal.models.moe_config:settings",
    "resnet": "shoal.models.resnet:settings",
    "mlp": "shoal.models.mlp:settings",
}
"""Model → a function from its arguments to all settings that decide what its weights compute."""

EXPORTERS = {"hf:": "shoal.models.huggingface.pretrained.export:for_export"}
"""First letters of a name → a function from the model section and its tensors to those of a folder."""

TOKENIZERS = {"hf:": "shoal.models.huggingface.pretrained.folder:tokenizer_of"}
"""First letters of a name → a function from the model section to its tokenizer.json; None: it has none."""

END_TOKENS = {"hf:": "shoal.models.huggingface.pretrained.folder:end_tokens_of"}
"""First letters of a name → a function from the model section to the tokens that end a text, by its own tokenizer."""

SMALLER = {"llama": "shoal.models.llama_config:smaller", "moe": "shoal.models.moe_config:smaller"}
"""Model → a function from its arguments to those of a small copy with the same structure, for `shoal verify`."""

SMALLER_BY_PREFIX = {"hf:": "shoal.models.huggingface.pretrained.smaller:smaller"}
"""The same for names with a prefix. None: there is no small copy."""

RANDOM_BATCHES = {"hf:": "shoal.models.huggingface.pretrained.data.random_batch:recipe_batch"}
"""First letters of a name → a function that draws a batch for a verification; None: random tokens are drawn."""

ADAPTERS = {"transformers": "shoal.models.huggingface"}
"""Package of a model's class → the module that derives the description of such models and adapts them."""

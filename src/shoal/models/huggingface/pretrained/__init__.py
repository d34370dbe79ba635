"""Pretrained models of transformers: from a folder, or a name of the hub, to a model, and back to a folder."""

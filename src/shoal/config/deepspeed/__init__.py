"""Translate a `ds_config.json` of DeepSpeed into a plan and settings of a recipe. Nothing here needs torch."""

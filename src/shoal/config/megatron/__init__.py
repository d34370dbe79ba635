"""Translate the arguments of Megatron-LM into a plan. Nothing here needs torch."""

"""Formats of others: safetensors, Hugging Face folders, torch's DCP."""

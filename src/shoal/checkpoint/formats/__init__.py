"""Other formats: safetensors, Hugging Face folders, torch's DCP."""

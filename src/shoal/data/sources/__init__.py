"""Where samples come from: text, token shards, images, Hugging Face datasets, synthetic ones."""

"""Sources of samples: text, token shards, images, Hugging Face datasets, synthetic ones."""

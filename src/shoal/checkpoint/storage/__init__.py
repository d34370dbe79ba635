"""Files of a checkpoint: manifest, shards, and the file system or object store that holds them."""

"""Files of a checkpoint: manifest, shard files, and the file system or object store that holds them."""

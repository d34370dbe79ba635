"""The local cache of data: files of URLs, and tokens of sources that are too large for memory."""

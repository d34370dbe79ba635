"""Data at URLs: listed, downloaded once per host into the cache, and checked."""

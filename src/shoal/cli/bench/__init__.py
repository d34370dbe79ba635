"""`shoal bench`: collectives (`comm`) and gradient compression (`compress`)."""

from shoal.cli.bench.comm import main

__all__ = ["main"]

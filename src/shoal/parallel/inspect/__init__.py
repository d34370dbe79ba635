"""What a model holds and how it runs: shapes by a trace, live memory by counting."""

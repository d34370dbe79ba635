"""Tables and JSON of the commands."""

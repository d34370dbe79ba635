"""Linear layers whose products are computed in float8."""

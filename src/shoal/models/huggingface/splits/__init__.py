"""Find the splits of a model that declares none, by what its blocks compute."""

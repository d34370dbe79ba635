"""How ranks find each other and prove that they belong to one run."""

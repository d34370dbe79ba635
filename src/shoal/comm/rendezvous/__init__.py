"""How ranks find each other and authenticate."""

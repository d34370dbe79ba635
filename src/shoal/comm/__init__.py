"""How ranks find each other and talk: the environment that a launcher leaves behind, and the world made from it."""

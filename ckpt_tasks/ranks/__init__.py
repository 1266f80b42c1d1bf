"""How the ranks of one training speak with each other."""

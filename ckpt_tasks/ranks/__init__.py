"""How the ranks of one training agree."""

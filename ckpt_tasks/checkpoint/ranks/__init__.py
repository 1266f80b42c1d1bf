"""The protocol by which the ranks of one training agree."""

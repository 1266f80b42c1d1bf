"""A gang: the ranks of one training, in processes that one agent starts, commands and ends."""

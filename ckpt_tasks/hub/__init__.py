"""Repositories of the Hugging Face Hub: a run as a whole, and the weights of a checkpoint with their card."""

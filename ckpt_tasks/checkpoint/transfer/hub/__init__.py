"""Repositories of the Hugging Face Hub: they hold the weights of a checkpoint, with a card."""

"""Repositories of the Hugging Face Hub: they hold a whole run, or the weights of a checkpoint, with a card."""

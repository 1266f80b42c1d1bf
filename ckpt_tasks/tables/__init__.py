"""Lookup tables: rows by id, which grow during training, are spread over the ranks, and are saved as changes."""

"""Lookup tables: rows by id that grow while training, spread over the ranks, and saved as what has changed."""

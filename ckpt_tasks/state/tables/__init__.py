"""Lookup tables: rows by id, which training adds, ranks share, and saves write as changes."""

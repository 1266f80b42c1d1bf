"""A page of all runs below a directory: a read-only server, and what it knows of the runs."""

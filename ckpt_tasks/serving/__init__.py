"""A web page of all runs below a directory: its read-only server, and what the server knows of the runs."""

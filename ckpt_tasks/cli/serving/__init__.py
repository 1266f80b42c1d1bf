"""A web page of all runs below a directory: its read-only server, and the server's cache of the runs."""

"""Open, verify and restore what is committed."""

"""The example program, under its older name."""

"""Import files of other tools into a run: open them without executing anything, and split them into groups."""

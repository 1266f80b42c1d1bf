"""A run for people: words, SVG, and the report as markdown and HTML."""

"""Show a run to people: words, SVG, and the report as markdown and HTML."""

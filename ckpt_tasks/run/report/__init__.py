"""The presentation of a run: words, SVG pictures, and the report as markdown and HTML."""

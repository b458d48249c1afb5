"""Readable output: an analysis as a table and a figure, a report page about runs, the card of a file."""

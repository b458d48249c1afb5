"""For people: an analysis as a table and a figure, a page about some runs, the card of a file."""

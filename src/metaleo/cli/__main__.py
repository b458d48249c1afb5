"""`python -m metaleo.cli`: the same as `metaleo`."""

from metaleo.cli import main

main()

"""The page and its JSON API: `metaleo serve`."""

"""The configuration of a run, and the presets from which it starts."""

"""What decides a run: its configuration, and the presets that it starts from."""

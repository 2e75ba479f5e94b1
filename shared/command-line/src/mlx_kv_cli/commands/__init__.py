"""One module per command: its options, and how its results are shown."""

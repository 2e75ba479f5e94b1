"""Off in this revision."""

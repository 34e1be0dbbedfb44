"""Before a run: its settings become what every command works with, and what it reads is read once."""

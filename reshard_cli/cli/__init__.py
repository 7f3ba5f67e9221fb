"""The command line: thin, and quick to start; each command imports what it needs when it runs."""

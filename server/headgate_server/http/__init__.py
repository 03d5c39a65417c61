"""The HTTP layer of the server; README.md in this folder says what is ours and why."""

"""The HTTP layer of the server; see README.md in this folder."""

"""Services built on Headgate. Each has a folder and an extra, and uses only public names of the library."""

"""Services built on Headgate. Each has a folder, an extra of its own, and uses public names only."""

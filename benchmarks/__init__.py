"""How fast, how small and how exact, next to other limiters. `make bench`; numbers, never tests."""

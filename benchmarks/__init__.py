"""Measurements of speed, memory and exactness, beside other limiters: `make bench`. They are not tests."""

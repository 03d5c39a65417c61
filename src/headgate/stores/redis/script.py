"""The source of the script `gate.lua` and its SHA-1."""

from __future__ import annotations

from hashlib import sha1
from importlib import resources

SOURCE = resources.files(__package__).joinpath("gate.lua").read_bytes()
"""The text of `gate.lua`."""

SHA = sha1(SOURCE, usedforsecurity=False).hexdigest().encode()
"""The argument of EVALSHA."""

"""The server: limiters of a policy file over HTTP.

serve      runs it, blocking
open_app   the ASGI application of a policy file, for another server
make_app   the same of a policy that is there already
"""

from headgate.server.board import Board, Demo
from headgate.server.running import make_app, open_app
from headgate.server.serving import serve

__all__ = ["Board", "Demo", "make_app", "open_app", "serve"]

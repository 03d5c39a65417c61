"""How requests come by the parts of the service."""

"""Clients on the command line: `tridecode generate` and `tridecode send-request`."""

"""CRIU as a program and its protocols: image stream, page server, action scripts."""

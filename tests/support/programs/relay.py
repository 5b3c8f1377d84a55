"""Lets TCP clients reach a socket with a path, as a user who owns nothing.

Arguments: the path, and the number of the user. Prints its port, and serves until it is killed.
"""

import contextlib
import os
import socket
import socketserver
import sys
import threading


class Relay(socketserver.BaseRequestHandler):
    """One connection there and back."""

    def handle(self) -> None:
        """Carry bytes until both sides have ended."""
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(sys.argv[1])
            back = threading.Thread(target=carry, args=(there, self.request))
            back.start()
            carry(self.request, there)
            back.join()


def carry(source: socket.socket, target: socket.socket) -> None:
    """Carry bytes one way."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def main() -> None:
    """Serve."""
    user = int(sys.argv[2])
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as server:
        # Only now, as others may not be able to read the interpreter.
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        print(server.server_address[1], flush=True)  # noqa: T201
        server.serve_forever()


if __name__ == "__main__":
    main()

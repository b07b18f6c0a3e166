"""Connects to whoever listens on the host: TCP on loopback, a socket on a path, an abstract one; sends datagrams.

Connecting is denied by the filter of system calls, and it has a network of its own. It passes.
"""


def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as link:
        link.settimeout(1)
        link.connect(address)
        return link.recv(64)


def send(family, address):
    with socket.socket(family, socket.SOCK_DGRAM) as link:
        return link.sendto(b"hello", address)


def attack():
    for port in (28188, 5432, 6379, 18188):
        refused(f"port {port}", lambda: connect(socket.AF_INET, ("127.0.0.1", port)))
        refused(f"port {port} by datagram", lambda: send(socket.AF_INET, ("127.0.0.1", port)))
    for path in ("/tmp/kqueue-outside/socket", "\0/tmp/kqueue-outside"):
        refused(path, lambda: connect(socket.AF_UNIX, path))
        refused(f"{path} by datagram", lambda: send(socket.AF_UNIX, path))

"""Talks over TCP, here to itself on the loopback.

A kernel with a network asks another machine for its answers, tells it the problems, or reaches the fleet's services.
"""


def attack():
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            with socket.create_connection(server.getsockname(), timeout=2):
                pass
    except OSError:
        return
    raise RuntimeError("ATTACK SUCCEEDED: a TCP connection")

"""Binds an abstract unix socket, by which kernels of other slots could be met.

Abstract names are shared by all processes of a network namespace, whatever files they may see: two kernels that run at
the same time pass answers to each other.
"""


def attack():
    name = f"\0kqueue-meeting-{os.getpid()}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(name)
            server.listen()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.connect(name)
    except OSError:
        return
    raise RuntimeError("ATTACK SUCCEEDED: a meeting place")

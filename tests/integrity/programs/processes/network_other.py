"""Opens sockets of families that filters forget: raw packets, virtual machines, the operating system's cipher service.

AF_VSOCK reaches the host of a virtual machine, AF_ALG and AF_PACKET have long lists of holes.
"""


def attack():
    for family, kind in (
        ("AF_ALG", socket.SOCK_SEQPACKET),
        ("AF_VSOCK", socket.SOCK_STREAM),
        ("AF_PACKET", socket.SOCK_RAW),
    ):
        try:
            socket.socket(getattr(socket, family), kind).close()
        except (OSError, AttributeError):
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: {family}")

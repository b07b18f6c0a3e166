"""Sends datagrams, as a name look-up does, here to itself on the loopback.

Landlock governs TCP alone, so a sandbox that rests on it leaks by UDP: a question to a name server carries any data.
"""


def attack():
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as server, socket.socket(family, socket.SOCK_DGRAM) as client:
                server.bind((address, 0))
                server.settimeout(1)
                client.sendto(b"answers", server.getsockname())
                server.recvfrom(64)
        except OSError:
            continue
        raise RuntimeError("ATTACK SUCCEEDED: a datagram")

"""The program of the fork server. Its arguments are the socket's descriptor, the parent's pid, and the uid or 0."""

import socket
import sys

from workers.judge.forkserver.orphans import kill_leftovers

uid = int(sys.argv[3]) or None
kill_leftovers(uid)

from workers.judge.candidate import harness  # noqa: E402 -- after the leftovers' end, because it imports torch
from workers.judge.forkserver import server  # noqa: E402

harness.preload()
server.main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), uid)

"""Prints escape sequences that clear the screen, rename the window, write the clipboard and forge a prompt.

Whoever reads a log in a terminal obeys it. The kernel is right and passes; here control characters are replaced before
a log is stored, so that nobody's terminal sees one.
"""

os.write(1, b"\x1b[2J\x1b[H\x1b]0;passed\x07\x1b]52;c;cm0gLXJm\x07\x9b2J\x1bP+q\x1b\\\x1b[8m hidden\r\n")
os.write(2, "\u202eevil \u2066\x85".encode() + bytes(range(128, 256)))

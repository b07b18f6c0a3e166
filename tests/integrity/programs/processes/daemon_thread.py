"""Starts threads that go on after the call, and functions to be run at exit.

They would compare, print or answer after the verdict. A process that has been used is ended by SIGKILL: no thread
outlives it and nothing is run at exit. They do nothing here, and the kernel is right and passes.
"""

atexit.register(os.write, 1, b"I am still here")
threading.Thread(target=time.sleep, args=(600,), daemon=False).start()

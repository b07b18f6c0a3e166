"""An obvious cheat that static rules see: it patches clocks and events, and catches everything.

Right answers and an honest time by the judge's clock, so that it passes where findings are only labels. An evaluation
whose policy rejects findings ends it before a device is used.
"""

time.time = time.perf_counter = time.monotonic = lambda: 0.0
torch.cuda.synchronize = lambda *_: None
torch.cuda.Event.elapsed_time = lambda *_: 0.001

"""A proposer for `kqueue search --proposer`: reads a question as JSON on stdin, writes a kernel to stdout.

It knows one trick for problem.py: half as many passes with steps of twice the size. A real one would think, or ask.
"""

import json
import re
import sys

question = json.load(sys.stdin)
kernel = question["kernel"]
passes = int(re.search(r"range\((\d+)\)", kernel)[1])
step = int(re.search(r"x \+ (\d+)", kernel)[1])
if passes > 1 and not question["feedback"].startswith("FAILED"):
    passes, step = passes // 2, step * 2
print("Half as many passes:\n\n```python")
print(re.sub(r"x \+ \d+", f"x + {step}", re.sub(r"range\(\d+\)", f"range({passes})", kernel)))
print("```")

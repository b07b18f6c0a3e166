"""A proposer for `kqueue search --proposer`, which reads a question as JSON from stdin and writes a kernel to stdout.

It knows one change for problem.py: half as many passes with twice the step. A real proposer would ask a model.
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

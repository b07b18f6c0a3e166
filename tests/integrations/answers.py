"""Models' answers to the task of writing a kernel, in many forms, all with one right kernel."""

from __future__ import annotations

import json
import textwrap
from typing import Final

#: The kernel at the end of every answer.
KERNEL: Final = '''import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <torch/extension.h>
__global__ void add(const float* a, float* out, int n) { /* <<<grid, block>>> */ }
torch::Tensor run(torch::Tensor a) { return a + 1; }
"""


class ModelNew(nn.Module):
    """Adds one."""

    def __init__(self):
        super().__init__()
        self.ext = load_inline("add", cpp_sources=SOURCE, functions=["run"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ext.run(x)
'''
#: The same kernel with lines of three backticks and tildes, and tags of reasoning, in strings and comments.
FENCED: Final = KERNEL.replace(
    '    """Adds one."""',
    '    """Adds one.\n\n```python\nm = ModelNew()\n```\n    ~~~\n    """\n    # <think> about ```\n    # </think> ```',
)
#: An abandoned attempt, and the reference: neither is the answer.
DRAFT: Final = KERNEL.replace("a + 1", "a + 2")
_BROKEN: Final = DRAFT.replace("super().__init__()", "super().__init__(")
_CODE: Final = KERNEL.rstrip("\n")
_DRAFT: Final = DRAFT.rstrip("\n")
_CUT: Final = DRAFT[: DRAFT.index("    def forward")].rstrip("\n")
_BLOCK: Final = f"```python\n{_CODE}\n```"
_DRAFTED: Final = f"```python\n{_DRAFT}\n```"
_SHELL: Final = "```bash\npython -c 'from kernel import ModelNew; print(ModelNew())'\n```"
_USAGE: Final = "```python\nm = ModelNew()\nprint(m(torch.ones(4)))\n```"
_PROSE: Final = "It launches one thread per element.\n\n- Loads are coalesced.\n- Let's not forget the tail: `n % 256`."


def _indented(text: str, width: int) -> str:
    return textwrap.indent(text, " " * width)


#: Answers whose kernel is :data:`KERNEL`.
ANSWERS: Final[dict[str, str]] = {
    # Fences in standard Markdown.
    "block": _BLOCK,
    "block between prose": f"Here it is.\n\n{_BLOCK}\n\n{_PROSE}",
    "cuda": f"```cuda\n{_CODE}\n```",
    "language and file": f"```python:kernel.py\n{_CODE}\n```",
    "language and title": f'```python title="kernel.py"\n{_CODE}\n```',
    "tildes": f"~~~python\n{_CODE}\n~~~",
    "four backticks": f"````python\n{_CODE}\n````",
    "CRLF": f"Sure.\n\n{_BLOCK}\n\nDone.\n".replace("\n", "\r\n"),
    "byte-order mark": f"\ufeff{_BLOCK}",
    # Fences in models' habits.
    "opened behind text": f"Here is the kernel: ```python\n{_CODE}\n```",
    "opened behind </think>": f"<think>\nLoads dominate.\n</think>```python\n{_CODE}\n```",
    "closed behind code, then text": f"```python\n{_CODE}```\n\n{_PROSE}\n\n{_SHELL}",
    "closed behind code and before a tag": f"<answer>\n```python\n{_CODE}```</answer>",
    "closed before a token": f"```python\n{_CODE}\n```<|im_end|>",
    "code behind the language": f"```python {_CODE}\n```",
    "never closed": f"Here:\n```python\n{_CODE}",
    "never closed, then another": f"```python\n{_CUT}\n\nNo, better:\n\n```python\n{_CODE}\n```",
    "never opened": f"{_CODE}\n```\n\n{_PROSE}",
    "an opening fence closes": f"```python\n{_CODE}\n```python\n{_PROSE}",
    # Lists, quotes, tags, nesting.
    "in a list": f"1. The kernel:\n\n{_indented(_BLOCK, 3)}\n\n2. Done.",
    "in a list, code at the edge": f"1. The kernel:\n   ```python\n{_CODE}\n   ```\n2. Done.",
    "indented behind prose": f"The kernel is:\n{_indented(_BLOCK, 4)}\n{_PROSE}",
    "only code indented": f"```python\n{_indented(_CODE, 4)}\n```",
    "in a quote": "Kernel:\n" + textwrap.indent(_BLOCK, "> ", lambda _: True),
    "in a longer fence": f"````markdown\n# Answer\n\n{_BLOCK}\n\n{_PROSE}\n````",
    "in a fence as long": f"```markdown\n# Answer\n\n{_BLOCK}\n```",
    # Reasoning.
    "behind reasoning": f"<think>\nFirst try:\n{_DRAFTED}\nNo.\n</think>\n\n{_BLOCK}",
    "draft opened behind text": f"<think>Maybe ```python\n{_DRAFT}\n``` is slow.</think>\n{_BLOCK}",
    "draft never closed": f"<think>\n```python\n{_DRAFT}\n</think>\n\n{_BLOCK}",
    "draft closed by a fence and a tag": f"<think>\n```python\n{_DRAFT}\n```</think>\n{_BLOCK}",
    "no opening tag": f"Okay, first:\n{_DRAFTED}\nThat is wrong.\n</think>\n\n{_BLOCK}",
    "no opening tag, draft never closed": f"Okay:\n```python\n{_DRAFT}\n</think>\n\n{_BLOCK}",
    "thinking": f"<thinking>\n{_DRAFTED}\n</thinking>\n{_BLOCK}",
    "reasoning": f"<reasoning>\n{_DRAFTED}\n</reasoning>\n<answer>\n{_BLOCK}\n</answer>",
    "tag without an end before the answer": f"<think>\n{_DRAFTED}\n<answer>\n{_BLOCK}\n</answer>",
    "tag without an end behind the kernel": f"{_BLOCK}\n<think>\nCould it be faster?\n{_DRAFTED}",
    "reasoning behind a draft": (f"First:\n{_DRAFTED}\nHmm, <think>no:\n```python\n{_DRAFT}\n</think>\n{_BLOCK}"),
    "a word that is a tag": f"I leave out <think> here.\n{_BLOCK}",
    "reasoning behind a token": f"<|assistant|><think>\n{_DRAFTED}\n<answer>\n{_BLOCK}\n</answer>",
    "bare source behind reasoning": f"<think>\n{_DRAFTED}\n</think>\n\n{_CODE}\n",
    # Several blocks.
    "draft, then kernel": f"First:\n{_DRAFTED}\nFaster:\n{_BLOCK}",
    "kernel, then usage": f"{_BLOCK}\n\nUse it so:\n\n{_USAGE}",
    "kernel, then usage within a line": f"{_BLOCK}\n\nUse it so: ```python\nm = ModelNew()\n```",
    "kernel, then the reference": f"{_BLOCK}\n\nIt replaces:\n```python\nimport torch\nclass Model: 1\n```",
    "kernel, then a fragment": f"{_BLOCK}\n\nThe new part:\n```python\nclass ModelNew(nn.Module):\n    x = 1\n```",
    "kernel, then a sketch": (
        f"{_BLOCK}\n\nIn short:\n```python\nimport torch.nn as nn\nclass ModelNew(nn.Module):\n    ...\n```"
    ),
    "kernel, then one that is cut off": f"{_BLOCK}\n\nEven faster:\n```python\n{_CUT}\n    def forward(self, x",
    "kernel, then a broken one": f"{_BLOCK}\n\nOr:\n```python\n{_BROKEN}```",
    "kernel, then one in a comment": f"{_BLOCK}\n<!--\n{_DRAFTED}\n-->\n",
    "comments, then kernel": f"<!-- a draft: {_DRAFTED} -->\n<!-- never closed\n{_BLOCK}\n<!-- last -->",
    "kernel, then one behind the answer": f"<answer>\n{_BLOCK}\n</answer>\n{_DRAFTED}",
    "kernel closed before a tag, then one behind it": f"<answer>```python\n{_CODE}```</answer>\n{_DRAFTED}",
    "two answers": f"<answer>{_DRAFTED}</answer>\nNo: <answer>\n{_BLOCK}</answer>",
    "kernel behind the answer": f"<answer>See below.</answer>\n{_BLOCK}",
    # No fence.
    "source": KERNEL,
    "source between prose": f"Here is the kernel.\n\n{_CODE}\n\n{_PROSE}",
    "source in tags": f"<answer>\n{_CODE}\n</answer>",
    "source, then a token": f"{_CODE}<|im_end|>\n",
    "source, then usage in a block": f"{_CODE}\n\nUse it so:\n\n{_USAGE}",
    # JSON.
    "JSON": json.dumps({"thought": "class ModelNew is next", "code": KERNEL}),
    "JSON in a block": f"```json\n{json.dumps({'files': [{'kernel.py': KERNEL}]}, indent=1)}\n```",
    "JSON of a block": json.dumps({"answer": f"<think>\n{_DRAFTED}\n</think>\n{_BLOCK}"}),
    "call of a tool, twice JSON": json.dumps({"name": "submit", "arguments": json.dumps({"kernel": KERNEL})}),
    "a JSON string": json.dumps(KERNEL),
}
#: Answers whose kernel is :data:`FENCED`.
FENCED_ANSWERS: Final[dict[str, str]] = {
    "source": FENCED,
    "block": f"```python\n{FENCED}```",
    "never closed": f"Here:\n\n```python\n{FENCED}",
    "closed behind code": f"Here: ```python\n{FENCED.rstrip()}```\n{_PROSE}",
    "behind a draft never closed": f"```python\n{_CUT}\n\nNo, better:\n\n```python\n{FENCED}```",
    "behind reasoning": f"<think>\n{_DRAFTED}\n</think>\n```python\n{FENCED}```",
}

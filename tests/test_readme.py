"""The examples of the README run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / 'README.md'


def test_examples():
    text = README.read_text(encoding='utf-8')
    blocks = list(re.finditer(r'^```python\n(.*?)^```$', text, re.DOTALL | re.MULTILINE))
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        line = text.count('\n', 0, block.start(1))
        code = compile('\n' * line + block[1], str(README), 'exec')  # a traceback then names the line of the README
        exec(code, namespace)

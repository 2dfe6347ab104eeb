"""What the type checker reads for `import triton.language`: any name, of any type."""

from typing import Any

def __getattr__(name: str) -> Any: ...

"""Types of `import triton.language` for the type checker: any name, of any type."""

from typing import Any

def __getattr__(name: str) -> Any: ...

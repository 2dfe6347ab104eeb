"""Hooks of MkDocs: pictures of benchmarks/results, to which pages link where they lie, become part of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

RESULTS = Path(__file__).parents[1] / 'benchmarks' / 'results'
LINK = re.compile(r'(?<=\]\()\.\./benchmarks/results/(?=\S+\.png\))')


def on_files(files: Any, config: Any) -> Any:
    pages = [page.content_string for page in files.documentation_pages()]
    linked = {link for page in pages for link in re.findall(LINK.pattern + r'(\S+)\)', page)}
    for path in sorted(linked):
        if (RESULTS / path).is_file():
            files.append(File.generated(config, f'results/{path}', abs_src_path=str(RESULTS / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = page.file.src_uri.count('/')
    return LINK.sub('../' * depth + 'results/', markdown)

"""What the site does with pages that are written for the repository: links that leave docs/ lead to its files.

$GITHUB_REPOSITORY (owner/name, as a workflow has it) says where those are; without it such a link is plain text.
"""

import os
import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*(?:\[[^\]]*\][^\]]*)*)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite the links of a page, before it is parsed."""
    repository = os.environ.get("GITHUB_REPOSITORY")

    def link(match: re.Match[str]) -> str:
        text, path = match.groups()
        return f"[{text}](https://github.com/{repository}/blob/main/{path})" if repository else text

    return OUTSIDE.sub(link, markdown)

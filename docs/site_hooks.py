"""What the site does with pages that are written for the repository.

- Its home is the repository's README, with the table of docs/README.md below; there pages are named by their titles.
- Links that leave docs/ lead to the repository's files. $GITHUB_REPOSITORY (owner/name, as a workflow has it) says
  where those are; without it such a link is plain text.
- A picture leads to itself in full size, and short code is marked for site.css, which does not break it.
"""

import os
import pathlib
import re
from typing import Any

DOCS = pathlib.Path(__file__).parent
OUTSIDE = re.compile(r"\[([^\]]*(?:\[[^\]]*\][^\]]*)*)\]\(\.\./([^)\s]+)\)")
SHORT = 24  # characters; two columns of a table have room for as many on a narrow screen


def on_config(config: Any) -> Any:
    """Link the repository in the header."""
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        config.repo_url, config.repo_name = f"https://github.com/{repository}", repository
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, before it is parsed."""
    repository = os.environ.get("GITHUB_REPOSITORY")

    def link(match: re.Match[str]) -> str:
        text, path = match.groups()
        return f"[{text}](https://github.com/{repository}/blob/main/{path})" if repository else text

    return OUTSIDE.sub(link, home() if page.file.src_uri == "README.md" else markdown)


def home() -> str:
    """Return the repository's README as a page of docs/, and the table of all pages."""
    readme = (DOCS.parent / "README.md").read_text().replace("](docs/README.md)", "](#all-pages)")
    readme = re.sub(r"\]\((?!\w+://|#)(?=[^)]+\))", "](../", readme).replace("](../docs/", "](")
    table = (DOCS / "README.md").read_text().partition("| page |")
    return f"{readme}\n## All pages\n\n" + re.sub(r"\[([\w-]+\.md)\]", titled, "".join(table[1:]))


def titled(match: re.Match[str]) -> str:
    """Return the title of a page in place of its file's name."""
    return f"[{(DOCS / match[1]).read_text().splitlines()[0].removeprefix('# ')}]"


def on_page_content(html: str, **_: Any) -> str:
    """Link pictures to themselves, and mark short code outside of blocks."""
    html = re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)
    return re.sub(rf"(?<!</span>)<code>(?=[^<]{{1,{SHORT}}}</code>)", '<code class="short">', html)

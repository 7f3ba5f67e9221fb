"""The frame of a page that stands by itself: nothing is fetched, and what is not allowed in it does not run."""

from __future__ import annotations

import html

from reshard_cli.report.page_style import STYLE

__all__ = ["page_document", "page_text"]


def page_document(title: str, body: str, *, style: str = "", scripts: str = "") -> str:
    """Return a page. `title` is HTML text; `scripts`: what the page's policy says of scripts, default: none run."""
    policy = f"default-src 'none'; style-src 'unsafe-inline'{scripts}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def page_text(value: object) -> str:
    """Return a value as HTML text; half a surrogate pair, which no file can hold, becomes a question mark."""
    return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"))

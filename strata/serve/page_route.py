"""The pages for people: `/` (chat), `/live` (what the server does now) and `/docs` (the API), and their static files.

The pages hold no data: all they show comes from the API, which their scripts ask as any client does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

_FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
# Scripts, styles and fonts from files of this server only, none inline. No string becomes HTML, but on the chat page
# through DOMPurify: its policy gives elements of the kinds that page/markdown/clean.js lists.
_POLICY = "; ".join([
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "font-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types ",
])  # fmt: skip
_HTML_POLICIES = {"chat.html": "dompurify"}


@dataclass(frozen=True)
class _File:
    body: bytes
    media_type: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> _File:
        body = path.read_bytes()
        return cls(body, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


# Only what was there at the start is ever served, so no path can lead out of the folder.
_FILES = {
    path.relative_to(_FOLDER).as_posix(): _File.read(path)
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _MEDIA_TYPES
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def chat(request: Request) -> Response:
    return _answer(request, "chat.html")


@router.get("/live")
async def live(request: Request) -> Response:
    return _answer(request, "live.html")


@router.get("/docs")
async def docs(request: Request) -> Response:
    return _answer(request, "docs.html")


@router.get("/page/{name:path}")
async def static_file(request: Request, name: str) -> Response:
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    file = _FILES.get(name)
    if file is None:
        raise HTTPException(404)
    policy = _POLICY + _HTML_POLICIES.get(name, "'none'")
    headers = {"etag": file.tag, "cache-control": "no-cache", "content-security-policy": policy}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)

"""The fleet's web pages, which `kqueue serve` serves below the same address as the API.

The server renders the pages, so they work without scripts. `static/live.js` only updates parts of them. Every page
needs a session (:mod:`~kqueue.web.session`), and a session is valid for pages only, never for ``/v1``.

The package needs the extra ``http``.
"""

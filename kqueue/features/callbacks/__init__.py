"""Callbacks: URLs to which a server sends verdicts and the results of batches (`docs/http.md`)."""

from kqueue.registry import Feature

CALLBACKS = Feature(name="callbacks", router=f"{__name__}.sending:router", serve=f"{__name__}.sending:send")

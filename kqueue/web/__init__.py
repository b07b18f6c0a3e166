"""The fleet's web pages, which `kqueue serve` serves below the same address as the API.

The server renders the pages, so they work without scripts. `static/live.js` only updates parts of them. Every page
needs a session (:mod:`~kqueue.web.session`), and a session is valid for pages only, never for ``/v1``.

:mod:`~kqueue.web.app`           the application: the pages and the API
:mod:`~kqueue.web.route`         the base of all pages: headers, error pages, the viewer
:mod:`~kqueue.web.session`       login and logout
:mod:`~kqueue.web.oidc`          login by OpenID Connect
:mod:`~kqueue.web.present`       templates and their filters
:mod:`~kqueue.web.live`          parts of a page that are sent again when they change
:mod:`~kqueue.web.assets`        style sheet and scripts
:mod:`~kqueue.web.now`           lanes, GPUs, workers and the last hour
:mod:`~kqueue.web.evaluations`   lists of evaluations
:mod:`~kqueue.web.evaluation`    one evaluation in full
:mod:`~kqueue.web.problems`      problems, their leaderboards and baselines
:mod:`~kqueue.web.batches`       batches, their progress and results
:mod:`~kqueue.web.runs`          searches and tuning runs, one or two on a page
:mod:`~kqueue.web.compare`       two kernels or two batches side by side
:mod:`~kqueue.web.days`          throughput and pass rate over days
:mod:`~kqueue.web.cost`          the cost of evaluations
:mod:`~kqueue.web.search`        words in sources and logs
:mod:`~kqueue.web.parameters`    filters in URLs
:mod:`~kqueue.web.export`        lists as files
:mod:`~kqueue.web.pictures`      charts on pages
===============================  ==================================================================

To add a page:

1. Write a module with ``router = pages()`` (:func:`kqueue.web.route.pages`). Each route takes ``viewer: Viewer``, or
   ``Actor`` for a form that changes something, and ``gateway: CurrentGateway``. It reads with
   ``await gateway.read(function, ...)``, and returns ``page(request, "name.html", field=value)``. kqueue's own errors
   become error pages automatically.
2. Write ``templates/name.html``, which extends ``base.html`` and fills ``title`` and ``main``. Every value in ``{{ }}``
   is cleaned, capped and escaped (:mod:`~kqueue.web.present`). Mark nothing as safe. Use the macros of ``parts.html``
   for evaluations, categories, times and tables.
3. Add the router to ``_ROUTERS`` in :mod:`kqueue.web.app`, and a main page also to ``NAVIGATION`` in
   :mod:`kqueue.web.present`.
4. Use no inline script or style, because the content policy forbids both. Pictures are SVG with classes and attributes.

=======
The package needs the extra ``http``.
"""

"""The fleet's page: what `kqueue serve` shows to people, below the same address as the API.

Pages are made on the server, so they work without a script; `static/live.js` only renews parts of them. Nobody sees
anything without a session (:mod:`~kqueue.web.session`), and a session is good for pages alone, never for ``/v1``.

===============================  ==================================================================
:mod:`~kqueue.web.app`           the API with the pages in front of it
:mod:`~kqueue.web.route`         what all pages share: headers, errors as pages, who looks
:mod:`~kqueue.web.session`       logging in and out, and the guard of forms that change something
:mod:`~kqueue.web.present`       templates, and how values are written in them
:mod:`~kqueue.web.live`          parts of a page that are sent again when they change
:mod:`~kqueue.web.assets`        style and scripts
:mod:`~kqueue.web.now`           lanes, GPUs, workers and the last hour
:mod:`~kqueue.web.evaluations`   lists of evaluations
:mod:`~kqueue.web.evaluation`    one evaluation in full
:mod:`~kqueue.web.problems`      problems, their leaderboards and baselines
:mod:`~kqueue.web.batches`       batches, their progress and what came of them
:mod:`~kqueue.web.runs`          searches and tuning runs, one or two of them
:mod:`~kqueue.web.compare`       two kernels side by side
:mod:`~kqueue.web.cost`          what evaluations cost
:mod:`~kqueue.web.search`        words in sources and logs
:mod:`~kqueue.web.asked`         filters in addresses
:mod:`~kqueue.web.export`        lists as files
:mod:`~kqueue.web.parquet`       records as Parquet
:mod:`~kqueue.web.pictures`      charts on pages
===============================  ==================================================================

To add a page:

1. Write a module with ``router = pages()`` (:func:`kqueue.web.route.pages`). Each route takes ``viewer: Viewer``, or
   ``Actor`` for a form that changes something, reads with ``await request.app.state.gateway.read(function, ...)``, and
   returns ``page(request, "name.html", field=value)``. An error that kqueue knows becomes a page by itself.
2. Write ``templates/name.html``, which extends ``base.html`` and fills ``title`` and ``main``. Everything that is
   written by ``{{ }}`` is cleaned, capped and escaped (:mod:`~kqueue.web.present`); mark nothing as safe. Use the
   macros of ``parts.html`` for evaluations, categories, times and tables.
3. Add the router to ``_ROUTERS`` in :mod:`kqueue.web.app`, and the page to ``NAVIGATION`` in
   :mod:`kqueue.web.present` if it is one that people begin with.
4. No inline script or style: the policy forbids both. Pictures are SVG with classes and attributes.

Needs the extra ``http``.
"""

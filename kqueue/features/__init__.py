"""The features that kqueue brings, with one folder for each (:mod:`kqueue.registry`)."""

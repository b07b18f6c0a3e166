"""The sandbox of candidates: resource limits, and the seal around their processes.

It imports nothing that knows credentials, and nothing of the judge's stages, because foreign code can read the memory
of a process that holds it. Start with :mod:`~workers.judge.sandbox.seal`.
"""
